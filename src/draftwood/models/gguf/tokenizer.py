"""Rebuilds the ``tokenizer.json`` of a model from the metadata of a GGUF file.

GGUF stores the vocabulary, the merges and the *name* of the pre-tokenizer. Each name stands for one published
tokenizer. An unknown name is refused: a wrong pre-tokenizer produces wrong tokens without any error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from draftwood.errors import ModelError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # kinds of tokens

# The word patterns of the published tokenizers of these families; only the treatment of digits differs.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _WORDS % r"\p{N}"
_LLAMA3_WORDS = _WORDS % r"\p{N}{1,3}"

_GPT2 = ("default", "gpt-2")
_DIGITS_APART = ("smollm", "starcoder")
_QWEN2 = ("qwen2",)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS = (*_GPT2, *_DIGITS_APART, *_QWEN2, *_LLAMA3)


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata describes."""
    pre = _check_kind(metadata)
    try:
        return _build(metadata, pre)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            "The tokenizer of this GGUF file is damaged", got=error, next_step="Fetch the file again."
        ) from error


def _build(metadata: Mapping[str, Any], pre: str) -> Tokenizer:
    tokens, kinds = vocabulary_of(metadata)
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=_merges(metadata, vocabulary), ignore_merges=pre in _LLAMA3))
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, kinds, strict=True))
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(token, normalized=False, special=special) for token, k in pairs if k == kind]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    tokenizer.post_processor = _post_processor(metadata, tokens)
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the content of ``tokenizer_config.json``: names of the special tokens, and the chat template."""
    tokens, _ = vocabulary_of(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # loads tokenizer.json unchanged
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = special_id(metadata, key)
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    if "general.architecture" in metadata:
        context = metadata.get(f"{metadata['general.architecture']}.context_length")
        if context:
            config["model_max_length"] = context
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def special_id(metadata: Mapping[str, Any], role: str) -> int | None:
    """Returns the id of the token with this role (``bos``, ``eos``, ``eot``, ...), or None."""
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return index if isinstance(index, int) and 0 <= index < len(vocabulary_of(metadata)[0]) else None


def ending_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Lists the ids of the tokens that end an answer."""
    found = [special_id(metadata, role) for role in ("eos", "eot", "eom")]
    if metadata.get("tokenizer.ggml.pre") in _QWEN2 and "<|endoftext|>" in metadata["tokenizer.ggml.tokens"]:
        # Qwen's published generation settings stop on it too; GGUF can name only one token.
        found.append(metadata["tokenizer.ggml.tokens"].index("<|endoftext|>"))
    return list(dict.fromkeys(index for index in found if index is not None))


def save_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(build_tokenizer(metadata).to_str(), encoding="utf-8")  # its save() hides why a write failed


def _check_kind(metadata: Mapping[str, Any]) -> str:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            "The tokenizer of this GGUF file cannot be rebuilt",
            got=f"tokenizer model {model!r}",
            allowed="gpt2 (byte-level pair encoding)",
            next_step="Use the model's own folder with its tokenizer.json instead of the GGUF file.",
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            "The tokenizer of this GGUF file uses an unknown pre-tokenizer",
            got=pre,
            allowed=PRE_TOKENIZERS,
            next_step="Use the model's own folder with its tokenizer.json instead of the GGUF file.",
        )
    return str(pre)


def vocabulary_of(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError("The GGUF file has no vocabulary", next_step="Fetch the file again.")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError("The GGUF file has different numbers of tokens and token types", next_step="Fetch it again.")
    return tokens, kinds


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    lines = metadata.get("tokenizer.ggml.merges", [])
    for line in lines if isinstance(lines, list) else [lines]:
        left, _, right = str(line).partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError("The vocabulary of the GGUF file lacks the tokens of a merge", got=repr(line))
        merges.append((left, right))
    return merges


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS_APART:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(parts)
    words = Regex(_QWEN2_WORDS if pre in _QWEN2 else _LLAMA3_WORDS)
    cut = pre_tokenizers.Split(words, behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> processors.PostProcessor:
    pattern, used = "$A", {}
    for role, before in (("bos", True), ("eos", False)):
        index = special_id(metadata, role)
        # Older files lack the flag; of these families only Llama 3 needs the opening token by default.
        absent = before and metadata.get("tokenizer.ggml.pre") in _LLAMA3
        if metadata.get(f"tokenizer.ggml.add_{role}_token", absent) and index is not None:
            used[tokens[index]] = index
            pattern = f"{tokens[index]} {pattern}" if before else f"{pattern} {tokens[index]}"
    if not used:
        return processors.ByteLevel(trim_offsets=False)
    parts = pattern.split(" ")
    return processors.TemplateProcessing(single=parts, special_tokens=list(used.items()))
