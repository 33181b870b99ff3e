"""Loads a tokenizer from local files (a Hugging Face directory or a .gguf file) and says plainly what is
wrong when that fails. Never reaches for a hub, never runs code from the model's directory.
"""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_ext.config.paths import path_in_words, why_no_file, why_no_path


def load_tokenizer(path: str | Path, chat_template: str | Path | None = None) -> PreTrainedTokenizerBase:
    """A fast tokenizer from `path`; `chat_template` is the path of a Jinja file that replaces its template.

    Raises ValueError when files are missing, cannot be read, or give a tokenizer without character offsets.
    """
    source = Path(path)
    reason = why_no_path(source) or (None if source.is_dir() else why_no_file(source))
    if reason is not None:
        raise ValueError(
            f"tokenizer path {path_in_words(source)} {reason}; give a Hugging Face directory or a .gguf file "
            "on this machine"
        )
    template = None if chat_template is None else _read_template(Path(chat_template))
    if source.is_dir():
        directory, options = source, {}
    elif source.suffix.lower() == ".gguf":
        directory, options = source.parent, {"gguf_file": source.name}
    else:
        raise ValueError(
            f"tokenizer path {source} is a file but not a .gguf file; give the directory that holds its tokenizer.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # transformers raises many kinds here, none of which names what we were given
        raise ValueError(
            f"no tokenizer could be loaded from {source} ({type(error).__name__}: {_first_line(error)}); the "
            "directory needs tokenizer.json and tokenizer_config.json, a .gguf file needs the gguf package"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer in {source} ({type(tokenizer).__name__}) gives no character offsets, by which "
            "the loss mask is found; convert it to a fast tokenizer (tokenizer.json)"
        )
    if len(tokenizer) == 0:
        raise ValueError(f"the tokenizer in {source} has an empty vocabulary; give the directory of a complete one")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def check_same_tokenizer(path: str | Path, teacher_path: str | Path) -> None:
    """Check that a teacher reads token ids as they are meant: no id stands for one token here and another there.

    Tokens that only one of the two has are no difference: the other has no use for their ids.

    Raises:
        ValueError: naming both tokenizers, their sizes, and the first tokens that differ.
    """
    if Path(path).resolve() == Path(teacher_path).resolve():
        return
    own, other = load_tokenizer(path).get_vocab(), _load_for_teacher(teacher_path).get_vocab()
    names = {token_id: token for token, token_id in other.items()}
    # a token with another id, and an id with another token
    differing = [
        f"{token!r} is {token_id} and {other[token]}"
        if token in other
        else f"{token_id} is {token!r} and {names[token_id]!r}"
        for token, token_id in sorted(own.items(), key=lambda item: item[1])
        if other.get(token, token_id) != token_id or names.get(token_id, token) != token
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(
            f"tokenizer_path {path} ({len(own)} tokens) and teacher_tokenizer_path {teacher_path} ({len(other)} "
            f"tokens) differ in {len(differing)} of them: {', '.join(differing[:3])}{more}; "
            "give a teacher with the student's tokenizer"
        )


def _load_for_teacher(path: str | Path) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"teacher_tokenizer_path: {error}") from error


def find_pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to fill padding with: pad, else end of sequence, else 0.

    Nothing depends on which one it is: padding is known by stored lengths and the loss mask, never by its id.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    return 0


def _read_template(file: Path) -> str:
    reason = why_no_file(file)
    if reason is not None:
        raise ValueError(f"chat_template {path_in_words(file)} {reason}; give the path of a Jinja chat template")
    try:
        template = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {file} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    if not template.strip():
        raise ValueError(f"chat_template {file} is empty; write a Jinja chat template into it")
    return template


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
