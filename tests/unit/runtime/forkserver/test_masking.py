"""A secret is found in its own form, and in the forms in which libraries print it."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest

from orchestrator.runtime.forkserver.masking import LONGEST_ENCODED, MASK, Masker

SECRETS = ["s3cr3t/with+chars &\u00e4", 'pass"word\\n', "plain-token-0123456789", "\udcff\udcfe-bytes-of-no-text"]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_found_as_urls_json_and_base64_have_it(secret: str) -> None:
    raw = secret.encode(errors="surrogateescape")
    told = [quote(raw), quote(raw, safe=""), quote_plus(raw), json.dumps(secret)[1:-1]]
    told += [encode(raw).decode() for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    masker = Masker([secret])
    for each in (secret, *told):
        assert masker.text(f"at http://user:{each}@host/").startswith(f"at http://user:{MASK}"), each
        assert each.encode(errors="surrogateescape") not in masker.data(f"<{each}>".encode(errors="surrogateescape"))


def test_a_secret_that_begins_another_leaves_no_rest_of_it() -> None:
    masker = Masker(["hunter", "hunter2-long", "ter2"])
    assert masker.text("hunter2-long hunter ter2 hunter2") == f"{MASK} {MASK} {MASK} {MASK}2"


def test_short_and_long_secrets_have_no_other_forms() -> None:
    assert Masker(["ab"]).parts == ("ab",)
    assert Masker(["x" * (LONGEST_ENCODED + 1)]).parts == ("x" * (LONGEST_ENCODED + 1),)
    assert Masker(["first line\nsecond line"]).parts == ("first line\nsecond line", "second line", "first line")


def test_the_beginning_of_another_form_is_held_back() -> None:
    masker = Masker(["p@ss/word"])
    assert masker.beginning(b"at p%40ss%2Fwo") == len(b"p%40ss%2Fwo")
