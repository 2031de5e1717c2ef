"""Files of kinds that prepare does not read: leftovers of other programs, and ways out."""

import re
import shlex
from pathlib import Path

# Of Spark and Delta, of editors, of downloads, of macOS and Windows.
LEFTOVER = re.compile(
    r"_SUCCESS|_(common_)?metadata|_(committed|started)_\d+|.*(~|\.crc|\.sw[op]|\.tmp|\.bak|\.lock"
    r"|\.part|\.crdownload)|#.*#|Thumbs\.db|desktop\.ini",
    re.IGNORECASE,
)

JSON_LINES = (
    'convert it by python3 -c "import csv, json, sys; csv.field_size_limit(2**31 - 1); '
    '[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{option})]" < {path} '
    "> {new}.jsonl, and name that with --field COLUMN"
)
MARKUP = "take its text out, such as by pandoc -t plain {path} -o {new}.txt, and name that"
TABLE = "write it as parquet by the library that made it, and name that"
IDS = "if it holds token ids, give it to lightning fit as data.path"
WAYS_OUT = {
    ".csv": JSON_LINES.replace("{option}", ""),
    ".tsv": JSON_LINES.replace("{option}", r", delimiter='\t'"),
    **dict.fromkeys((".html", ".htm", ".docx", ".odt", ".epub", ".rtf"), MARKUP),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), TABLE),
    **dict.fromkeys((".npy", ".bin"), IDS),
    ".pdf": "take its text out by pdftotext {path} {new}.txt, and name that",
}
PLAIN = "if it is plain text, copy it by cp {path} {new}.txt, and name that; else name other files"


def is_leftover(path: Path) -> bool:
    """Whether a name is that of a marker, a backup or an unfinished file of another program."""
    return LEFTOVER.fullmatch(path.name) is not None


def way_out(path: Path) -> str:
    """Return how a file of a kind that is not read becomes one that is."""
    quoted = shlex.quote(str(path))
    return (
        WAYS_OUT.get(path.suffix.lower(), PLAIN).replace("{path}", quoted).replace("{new}", quoted)
    )
