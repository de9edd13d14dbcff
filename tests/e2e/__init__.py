"""End-to-end tests: the real server with the real model, over real sockets."""

import pytest

# So that their assertions say what they saw, as those of the tests do.
pytest.register_assert_rewrite("tests.e2e.answers", "tests.e2e.server")
