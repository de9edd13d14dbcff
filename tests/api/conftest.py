"""The real tokeniser, and apps over a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from staffel.api.app import create_app
from staffel.api.grammars import Grammars
from staffel.api.limits import Limits
from staffel.api.serving import ApiOptions
from staffel.api.tokens import Tokenizer
from tests.api.doubles import Script, ScriptedEngineDouble, make_spec

MakeApp = Callable[..., tuple[FastAPI, ScriptedEngineDouble]]


@pytest.fixture(scope="session")
def tokenizer(real_model: Path) -> Tokenizer:
    return Tokenizer.load(real_model)


@pytest.fixture(scope="session")
def grammars(real_model: Path) -> Iterator[Grammars]:
    made = Grammars(make_spec(path=str(real_model)), Limits())
    yield made
    made.close()


@pytest.fixture
def make_app(tokenizer: Tokenizer, grammars: Grammars) -> MakeApp:
    def make(
        script: Script, options: ApiOptions | None = None, **spec: Any
    ) -> tuple[FastAPI, ScriptedEngineDouble]:
        engine = ScriptedEngineDouble(script)
        return create_app(engine, make_spec(**spec), tokenizer, grammars, options), engine

    return make
