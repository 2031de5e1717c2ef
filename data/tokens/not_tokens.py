"""Files that look like something else than token ids, and what to do with them."""

from pathlib import Path

# By their first bytes: what they are, and how their ids or their text can be used.
UNPACK = "unpack it first"
SAVE_IDS = "load it where it came from and save its ids by np.save, as np.uint16 or np.uint32"
MODEL = "name token files"
KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b\x08", "a gzip archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", UNPACK),
    (b"BZh", "a bzip2 archive", UNPACK),
    (b"\xfd7zXZ\x00", "an xz archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"\x04\x22\x4d\x18", "an lz4 archive", UNPACK),
    (b"PK\x03\x04", "a zip archive, or what torch.save or np.savez wrote", SAVE_IDS),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9", "what torch.save wrote", SAVE_IDS),  # before release 1.6
    (b"\x89HDF\r\n", "an HDF5 file", SAVE_IDS),
    (b"ARROW1", "an Arrow file", SAVE_IDS),
    (b"PAR1", "a parquet file", "rename it to .parquet and give it to lightning prepare --input"),
    (b"\xff\xff\xff\xff", "an Arrow stream", SAVE_IDS),
    (b"SQLite format 3\0", "an SQLite database", SAVE_IDS),
    (b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (b"MMIDIDX\0\0", "an index of Megatron", "name the .bin file beside the index"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file by git lfs pull"),
    (b"GGUF", "a GGUF model", MODEL),
    ((20240326).to_bytes(4, "little"), "a model of llm.c", MODEL),
    ((20240328).to_bytes(4, "little"), "a tokenizer of llm.c", MODEL),
    ((20240522).to_bytes(4, "little"), "an evaluation set of llm.c", MODEL),
)
TAR, TAR_AT = b"ustar", 257
PICKLE_PROTOCOLS, PICKLE_STOP = (2, 3, 4, 5), b"."

HEAD_BYTES = 1 << 16
# Fewer bytes may be printable by chance.
LEAST_TEXT = 64
TEXT = bytes([*range(7, 14), 27, *range(32, 127), *range(128, 256)])
# Text holds next to no control characters; of the bytes of ids at least a tenth are some.
MOST_CONTROLS = 0.01
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
PREPARE = (
    "rename it to what it holds (.txt, .jsonl) and give it to lightning prepare --input FILE "
    "--output DIR"
)


def refuse_other_kinds(path: Path) -> None:
    """Refuse a file without a header that holds no ids.

    Raises:
        ValueError: it is text, an archive, a pickle or a model; says what to do with it.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, path.stat().st_size - 1))
        last = file.read(1)
    if found := kind_of(head, last):
        what, way_out = found
        raise ValueError(f"{path} is {what} by its content, not token ids: {way_out}")


def kind_of(head: bytes, last: bytes) -> tuple[str, str] | None:
    """What a file is by its first bytes and its last one, and the way out; None for ids."""
    for begin, what, way_out in KINDS:
        if head.startswith(begin):
            return what, way_out
    if head[TAR_AT:].startswith(TAR):
        return "a tar archive", UNPACK
    if head[:1] == b"\x80" and head[1:2] and head[1] in PICKLE_PROTOCOLS and last == PICKLE_STOP:
        return "a pickle", SAVE_IDS
    # safetensors: the length of a JSON object, and the object.
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file", SAVE_IDS
    if head.startswith(UTF16_MARKS):
        # A token file may begin with that id, but does not go on as text.
        head = head[: len(head) // 2 * 2].decode("utf-16", errors="replace").encode()
        head = head.replace("\ufffd".encode(), b"\0")
    controls = len(head.translate(None, TEXT))
    if len(head) >= LEAST_TEXT and controls <= MOST_CONTROLS * len(head):
        return "text", PREPARE
    return None
