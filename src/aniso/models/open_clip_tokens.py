"""The tokenizers of open_clip."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from aniso.errors import InputError, printable
from aniso.models.tokenizer_file import LateTokenizer, TokenizerError, TokenizerFile, backend_text


@final
class OpenClipTokens(LateTokenizer):
    """CLIP's BPE, which open_clip includes; other tokenizers come from the model's directory.

    They come from the hub only for architectures of open_clip's own list, which the user named.
    """

    def __init__(self, config: Mapping[str, Any], home: Path | None = None) -> None:
        self._text = dict(config["text_cfg"])
        self._home = home
        self._length = int(self._text.get("context_length", 77))

    def _read(self) -> Any:
        from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

        name = self._text.get("hf_tokenizer_name")
        settings = {**(self._text.get("tokenizer_kwargs") or {}), "context_length": self._length}
        if not name:
            return self._fitting(SimpleTokenizer(**_known(settings, "clean")))
        if self._home is not None:
            return self._from_home(self._home, **_known(settings, "clean", "strip_sep_token"))
        settings = {**_known(settings, "clean", "strip_sep_token", "language"), "trust_remote_code": False}
        try:
            return HFTokenizer(name, tokenizer_mode=self._text.get("tokenizer_mode"), **settings)
        except (OSError, ValueError) as e:
            raise InputError(
                "MODEL-TOKENIZER",
                f"the tokenizer '{printable(name)}' is not on this machine and could not be fetched",
                reason=printable(str(e).partition("\n")[0]),
                fix=f"hf download {printable(name)}",
            ) from None

    def _from_home(
        self, home: Path, context_length: int, clean: str = "whitespace", strip_sep_token: bool = False
    ) -> Any:
        """Return open_clip's wrapper around the tokenizer in a directory."""
        from open_clip.tokenizer import HFTokenizer, get_clean_fn
        from transformers import PreTrainedTokenizerFast

        reason = "there is no tokenizer.json"
        try:
            if (home / "tokenizer.json").is_file():
                file = TokenizerFile.read(home)
                marks = {mark: token for mark, token in file.marks.items() if token is not None}
                made = HFTokenizer.__new__(HFTokenizer)  # its constructor would access the hub
                wrapped: Any = PreTrainedTokenizerFast
                made.tokenizer = wrapped(tokenizer_object=file.backend, **marks)
                made.tokenizer_mode = self._text.get("tokenizer_mode") or ""
                made.context_length, made.clean_fn = context_length, get_clean_fn(clean)
                made.strip_sep_token = strip_sep_token
                if file.pad_token_id is not None:
                    return made
                reason = "tokenizer.json has no token for padding"
        except TokenizerError as e:
            reason = f"tokenizer.json is damaged: {printable(e)}"
        name = printable(self._text.get("hf_tokenizer_name"))
        raise InputError(
            "MODEL-TOKENIZER",
            f"'{printable(home)}' needs the tokenizer '{name}', and a directory never makes aniso fetch one",
            reason=reason,
            fix=f"hf download {name} tokenizer.json tokenizer_config.json --local-dir '{printable(home)}'",
        )

    def _fitting(self, made: Any) -> Any:
        size = int(self._text.get("vocab_size", made.vocab_size))
        if size != made.vocab_size:
            raise InputError(
                "MODEL-TOKENIZER",
                "the text tower has a different vocabulary than CLIP's tokenizer",
                expected=f"{made.vocab_size} tokens",
                found=f"{size} tokens",
                fix="add hf_tokenizer_name to text_cfg in open_clip_config.json",
            )
        return made

    @property
    def fingerprint(self) -> str:
        if self._text.get("hf_tokenizer_name"):
            text = backend_text(self._tokenizer.tokenizer.backend_tokenizer)
        else:
            text = "\n".join(f"{k} {v}" for k, v in sorted(self._tokenizer.encoder.items()))
        how = [self._text.get(part) for part in ("tokenizer_kwargs", "tokenizer_mode")]
        return hashlib.sha256(f"{self._length}\n{how}\n{text}".encode()).hexdigest()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        ids: Tensor = self._tokenizer(list(texts))
        cut = []
        if hasattr(self._tokenizer, "encode"):
            full = ids[:, -1] != 0  # only texts that fill the row, or were truncated, use its last place
            cut = [
                i
                for i in full.nonzero().flatten().tolist()
                if len(self._tokenizer.encode(texts[i])) + 2 > ids.shape[1]
            ]
        return ids, cut


def _known(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the settings that are known to be data; others would reach functions that may run code."""
    return {name: settings[name] for name in ("context_length", *names) if name in settings}
