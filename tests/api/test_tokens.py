from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from staffel.api.detokenize import Detokenizer
from staffel.api.tokens import Tokenizer
from staffel.config import ConfigError


def text_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(id) for id in ids), detokenizer.flush()]


def sentencepiece_like() -> Tokenizer:
    vocab = ["<s>", "▁Hello", "▁", "s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁▁x"]
    backend = Backend(models.BPE({token: id for id, token in enumerate(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_any_ids_give_the_text_of_the_tokenisers_own_decoder(tokenizer: Tokenizer) -> None:
    drawn = random.Random(1)
    for _ in range(200):
        ids = [drawn.randrange(17, 49152) for _ in range(20)]
        assert "".join(text_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_split_character_waits_until_it_is_whole(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode(["a😀"], add_special_tokens=False)
    assert len(ids) > 2
    assert text_of(tokenizer, ids) == ["a", *[""] * (len(ids) - 2), "😀", ""]


def test_a_character_that_never_gets_whole_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode(["a😀"], add_special_tokens=False)
    assert text_of(tokenizer, ids[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_stand_for_no_text(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode(["a<|im_end|>b"], add_special_tokens=False)
    assert "".join(text_of(tokenizer, ids)) == "ab"


def test_spaces_and_byte_tokens_of_sentencepiece() -> None:
    tokenizer = sentencepiece_like()
    assert text_of(tokenizer, [0, 1, 1, 3, 4, 5, 6, 7, 8]) == [
        "", " Hello", " Hello", "s", "", "", "", "😀", "  x", "",
    ]  # fmt: skip


def test_an_id_beyond_the_tokeniser_is_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(60000) == b""


def test_a_tokeniser_without_bytes_is_refused_by_name() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ConfigError, match="decoder"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_folder_without_a_tokeniser_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_the_api_never_imports_torch(real_model: Path) -> None:
    code = f"""
import sys
from staffel.api.app import create_app
from staffel.api.grammars import Grammars
from staffel.api.limits import Limits
from staffel.api.tokens import Tokenizer
from tests.api.doubles import ScriptedEngineDouble, make_spec
tokenizer = Tokenizer.load({str(real_model)!r})
create_app(ScriptedEngineDouble(lambda request: []), make_spec(), tokenizer,
           Grammars(make_spec(), Limits()))
tokenizer.render([{{"role": "user", "content": "Hi"}}], add_generation_prompt=True,
                 continue_final_message=False, kwargs={{}})
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
