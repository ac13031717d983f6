"""Link names and paths inside the files: any text becomes a legal HDF5 link name, reversibly where it is short.

HDF5 links may hold anything but ``/`` and NUL, must not be empty, and ``.`` means the group itself. Owns no state.
"""

from __future__ import annotations

import hashlib
import re

from flightrec.records import NO_MICROBATCH, Key, Stage

MAX_LINK_BYTES = 200
"""UTF-8 length up to which an escaped name is a link as it is; longer ones are shortened and end in a hash."""

EMPTY = "%"
_SHORTENED = "%~"
_UNSAFE = re.compile("[%/\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPES = re.compile("(?:%[0-9A-F]{2})+")
_TOKEN = re.compile("%[0-9A-F]{2}|.", re.DOTALL)
_FILE_UNSAFE = re.compile("[^A-Za-z0-9_-]+")


def escape(text: str) -> str:
    """Give the link name of any text; different texts get different names.

    ``%``, ``/``, control characters and lone surrogates become ``%XX`` for each byte of their UTF-8 (surrogates
    passed); ``.`` and ``..`` become ``%2E`` and ``%2E%2E``; the empty text becomes ``%``. A result above
    ``MAX_LINK_BYTES`` keeps its beginning and ends in ``%~`` and 32 hexadecimal digits of the text's SHA-256.
    """
    if not text:
        return EMPTY
    if text in {".", ".."}:
        return text.replace(".", "%2E")
    link = _UNSAFE.sub(lambda found: _percent(found.group()), text)
    if len(link.encode()) <= MAX_LINK_BYTES:
        return link
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    kept, length = [], 0
    for token in _TOKEN.findall(link):
        length += len(token.encode())
        if length > MAX_LINK_BYTES - len(_SHORTENED) - len(digest):
            break
        kept.append(token)
    return "".join(kept) + _SHORTENED + digest


def unescape(link: str) -> str | None:
    """Give the text back from ``escape``'s link name; None for a shortened one, whose text stands in ``/names``."""
    if link == EMPTY:
        return ""
    if _SHORTENED in link:
        return None
    return _ESCAPES.sub(
        lambda found: bytes.fromhex(found.group().replace("%", "")).decode("utf-8", "surrogatepass"), link
    )


def iteration_link(attempt: int, iteration: int) -> str:
    """``<attempt>.<iteration, seven digits or more>``."""
    return f"{attempt}.{iteration:07d}"


def record_path(attempt: int, iteration: int, key: Key, num_microbatches: int) -> str:
    """Absolute group of a record in the tensors file.

    ``/<attempt>.<iteration>/<layer>/<tensor>/<microbatch>.<phase>.<call>.<stage>[.<part>]``; a record without a
    microbatch stands at -1 (stage ``start``) or at ``num_microbatches``.
    """
    position = key.microbatch
    if position == NO_MICROBATCH:  # a loss too: the last microbatch may have its own
        position = -1 if key.stage is Stage.START else num_microbatches
    last = f"{position}.{key.phase.value}.{key.call}.{key.stage.value}"
    if key.part:
        last = f"{last}.{escape(key.part)}"
    return f"/{iteration_link(attempt, iteration)}/{escape(key.layer)}/{escape(key.tensor)}/{last}"


def file_word(text: str) -> str:
    """Give a word for file names: ``[A-Za-z0-9_-]`` only, at most 64 long, with a hash when anything was changed."""
    word = _FILE_UNSAFE.sub("-", text)[:48]
    if word == text and word:
        return word
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{word}-{digest}" if word else digest


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
