"""Grammars of requests: which tokens a JSON schema allows next."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.errors import SamplingParamsError

INSTALL = 'pip install "agent-loop[grammar]"'
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PROBE = '{"a":1}'
MAX_COMPILED = 64
"""Number of schemas that are kept compiled."""


class Grammar:
    """Position of one completion in its schema."""

    def __init__(
        self, matcher: Any, *, stop_token_ids: frozenset[int], eos_token_ids: frozenset[int]
    ) -> None:
        """Start at the beginning of the text.

        Args:
            matcher: Matcher of `llguidance`, which this object owns.
            stop_token_ids: Tokens that end the completion. Allowed where the text is complete, and only there.
            eos_token_ids: The model's end tokens. Not allowed unless they are stop tokens.
        """
        self._matcher = matcher
        self._stops = np.array(sorted(stop_token_ids), np.int64)
        self._ends = np.array(sorted(eos_token_ids | stop_token_ids), np.int64)
        self._stop_set = stop_token_ids

    @property
    def problem(self) -> str:
        """Why the grammar cannot go on; empty if it can."""
        # The lines after the first are the parser's state.
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else ""

    @property
    def is_over(self) -> bool:
        """Whether the text is complete, and no token could follow."""
        return not self._stop_set and self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return which tokens may follow, shape [vocab_size]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(vocab_size, np.bool_)
        found = np.unpackbits(bits, bitorder="little", count=min(vocab_size, 8 * len(bits)))
        allowed[: len(found)] = found
        allowed[self._ends] = False
        if self._matcher.is_accepting():
            allowed[self._stops] = True
        return allowed

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token."""
        if token_id not in self._stop_set:
            self._matcher.consume_token(token_id)

    def replay(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens that were sampled before an interruption. Return how many of them the grammar accepts."""
        return int(self._matcher.try_consume_tokens(list(token_ids)))


class GrammarCompiler:
    """Compiles the schemas of requests for one tokenizer. Can be used from several threads."""

    def __init__(
        self,
        tokenizer_path: str,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        trust_remote_code: bool = False,
    ) -> None:
        """Create a compiler. The tokenizer is loaded for the first schema."""
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._trust_remote_code = trust_remote_code
        self._lock = Lock()
        self._tokenizer: Any = None
        self._compiled: dict[str, Any] = {}

    @staticmethod
    def is_available(tokenizer_path: str) -> bool:
        """Return whether the package is installed, and a local folder has a tokenizer. Hub names are not looked up."""
        folder = Path(tokenizer_path)
        has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES) or not folder.is_dir()
        return has_tokenizer and find_spec("llguidance") is not None

    def grammar(
        self, json_schema: str, *, stop_token_ids: frozenset[int], sampled: Sequence[int] = ()
    ) -> Grammar:
        """Compile a schema. The first time for a schema may take a second."""
        with self._lock:
            matcher = self._compiled.get(json_schema)
            if matcher is None:
                matcher = self._compile(json_schema)
                if len(self._compiled) >= MAX_COMPILED:
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[json_schema] = matcher
            grammar = Grammar(
                matcher.deep_copy(), stop_token_ids=stop_token_ids, eos_token_ids=self._eos_token_ids
            )
        accepted = grammar.replay(sampled)
        if accepted < len(sampled):
            raise SamplingParamsError(
                f"json_schema does not allow token {accepted} of the {len(sampled)} that were sampled before "
                "(num_sampled); resume a completion with the schema that it began with"
            )
        return grammar

    def _compile(self, json_schema: str) -> Any:
        try:
            llguidance: Any = import_module("llguidance")
        except ImportError as error:
            raise SamplingParamsError(f"json_schema in the embedded engine needs: {INSTALL}") from error
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json_schema)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            problem = str(error)
        else:
            if not problem:
                return matcher
        raise SamplingParamsError(f"json_schema is {json_schema!r:.80}: {problem}; fix the schema")

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        loader: Any = AutoTokenizer
        try:
            tokenizer = loader.from_pretrained(self._path, trust_remote_code=self._trust_remote_code)
            if PROBE not in tokenizer.decode(
                tokenizer.encode(PROBE)
            ):  # made up from the model's configuration
                raise ValueError("its vocabulary has no JSON")
            return import_module("llguidance.hf").from_tokenizer(
                tokenizer,
                max(self._vocab_size, len(tokenizer)),
                eos_token=sorted(self._eos_token_ids) or tokenizer.eos_token_id,
            )
        except (OSError, ValueError) as error:
            raise SamplingParamsError(
                f"json_schema needs a fast tokenizer, and {self._path!r} has none ({error}); set model.tokenizer_path"
            ) from error


def without_forbidden(logits: Tensor, grammars: Sequence[Grammar | None]) -> Tensor:
    """Return logits, [rows, vocab], with minus infinity for the tokens that a row's grammar does not allow."""
    rows = [row for row, grammar in enumerate(grammars) if grammar is not None]
    if not rows:
        return logits
    allowed = np.stack([g.allowed(logits.shape[-1]) for g in grammars if g is not None])
    index = torch.tensor(rows, device=logits.device)
    constrained = logits.clone()  # a backend may keep its logits
    mask: Tensor = torch.as_tensor(allowed, device=logits.device)
    constrained[index] = logits[index].masked_fill(~mask, float("-inf"))
    return constrained
