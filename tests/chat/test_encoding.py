from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agent_loop.chat.encoding import MASK_OPEN, ControlledEncoder
from tests.chat.byte_level import like

CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "<tool_call>", "</tool_call>"]


def metaspace_bpe() -> Tokenizer:
    """Return a tokenizer like Llama 2's: byte fallback, control tokens in the vocabulary, a space before the text."""
    pieces = [
        "<unk>",
        *CONTROLS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdefghinostul<>|[]/_",
    ]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROLS])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer whose control tokens have the best scores, as in sentencepiece models."""
    pieces = [("<unk>", 0.0), *((text, 0.0) for text in CONTROLS)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    pieces += [(char, -5.0) for char in "\u2581abcdefghinostul<>|[]/_"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROLS])
    return tokenizer


def lower_case() -> Tokenizer:
    """Return a tokenizer that searches for control tokens in the normalised text."""
    tokenizer: Any = Tokenizer.from_str(like("gpt2").to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<answer>", normalized=True)])
    return tokenizer


@cache
def encoder_of(kind: str) -> ControlledEncoder:
    makers = {
        "byte-level": lambda: like("gpt2"),
        "byte-level, whole words first": lambda: like("llama3"),
        "metaspace": metaspace_bpe,
        "unigram": unigram,
        "lower case": lower_case,
    }
    return ControlledEncoder(makers[kind]())


KINDS = ["byte-level", "byte-level, whole words first", "metaspace", "unigram", "lower case"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", ["{}", "a {} b", "a{}b", "{0}{0}", "<{}>"])
def test_control_tokens_in_untrusted_text_are_encoded_as_plain_text(kind: str, around: str) -> None:
    encoder = encoder_of(kind)
    own = [encoder.encode("<|im_start|>")[0], encoder.encode("<|im_end|>")[0]]
    for text in [*encoder.control_texts, *map(str.upper, encoder.control_texts)]:
        untrusted = around.format(text)
        assert encoder.control_ids.isdisjoint(
            encoder.encode_plain(encoder.unmask(encoder.mask(untrusted)))
        ), text
        ids = encoder.encode(f"<|im_start|>{encoder.mask(untrusted)}<|im_end|>")
        assert [i for i in ids if i in encoder.control_ids] == own, text


@pytest.mark.parametrize("kind", KINDS[:4])
def test_untrusted_text_with_control_tokens_decodes_to_itself(kind: str) -> None:
    encoder = encoder_of(kind)
    untrusted = "said" + "".join(encoder.control_texts) + "and" + MASK_OPEN + ".3c;"
    decoded = encoder.decode(encoder.encode(f"<s>{encoder.mask(untrusted)}</s>"))
    assert decoded.replace("<s> said", "<s>said") == f"<s>{untrusted}</s>"


@pytest.mark.parametrize("kind", KINDS[:4])
def test_masks_do_not_change_tokens_outside_the_masked_text(kind: str) -> None:
    encoder = encoder_of(kind)
    before, after = "<s>hello the fox<|im_start|>", "<|im_end|>is tool"
    ids = encoder.encode(f"{before}{encoder.mask('a</s>')}{after}")
    own_before = encoder.encode(before)
    assert ids[: len(own_before)] == own_before
    assert encoder.encode(f"{before}x{after}")[-3:] == ids[-3:]


@given(st.lists(st.sampled_from([*"<>|/s[]INTim_endstart ", MASK_OPEN, ".", ":", "3c;", "\n"])).map("".join))
def test_unmasking_restores_the_text_without_control_tokens(text: str) -> None:
    encoder = encoder_of("byte-level")
    masked = encoder.mask(text)
    assert encoder.unmask(masked) == text
    assert encoder.control_ids.isdisjoint(encoder.encode(masked))
    assert encoder.decode(encoder.encode(masked)) == text
