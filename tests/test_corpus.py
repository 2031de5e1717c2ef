import platform

import pytest

from data.prepare import corpus


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A corpus "tiny" of one package with a file of each kind."""
    for name in ("b.py", "a.py", "z/inner.py", "tests/no.py", "z/test/no.py", "note.txt"):
        path = tmp_path / "tinypackage" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "tinypackage" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(corpus.CORPORA, "tiny", ("tinypackage",))
    return tmp_path / "tinypackage"


def test_files_are_sorted_by_a_name_free_of_machine_paths(package):
    found = corpus.python_files("tiny")
    names = ["tinypackage/__init__.py", "tinypackage/a.py", "tinypackage/b.py"]
    assert [name for name, _ in found] == [*names, "tinypackage/z/inner.py"]
    assert found[1][1] == package / "a.py"


def test_stdlib_holds_its_modules_and_no_tests():
    names = [name for name, _ in corpus.python_files("stdlib")]
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= set(names)
    assert not [n for n in names if corpus.LEFT_OUT & set(n.split("/"))]


def test_python_corpus_adds_installed_packages_to_stdlib():
    sources = {name.split("/")[0] for name, _ in corpus.python_files("python")}
    assert sources == {"stdlib", "torch", "lightning", "numpy"}


def test_unknown_corpus_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="corpus is 'pyton': must be one of python, stdlib"):
        corpus.python_files("pyton")


def test_source_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setitem(corpus.CORPORA, "tiny", ("no_such_package",))
    with pytest.raises(ValueError, match="'no_such_package' is not an installed package"):
        corpus.python_files("tiny")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("é = 'λ漢'\r\n".encode(), "é = 'λ漢'\n"),
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
        (b"# coding: latin-1\n# \xe9\n", "# coding: latin-1\n# é\n"),
        (b"", ""),
        (b"x = '\xff'\n", None),
        (b"# coding: no-such-codec\n", None),
    ],
)
def test_source_is_read_in_the_encoding_it_declares(tmp_path, content, text):
    path = tmp_path / "a.py"
    path.write_bytes(content)
    assert corpus.read_source(path) == text


def test_description_names_the_version_of_everything_read():
    described = corpus.describe("python")
    assert described["name"] == "python"
    assert list(described["versions"]) == ["python", "torch", "lightning", "numpy"]
    assert described["versions"]["python"] == platform.python_version()
