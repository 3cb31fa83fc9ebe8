"""Where rows come from, with the network played by a local file."""

import hashlib
import json
import shutil

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.data.duplicates import Guard
from cria_tricks.data.lengths import row_lengths
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import CONTRACT
from cria_tricks.data.tokens import tokenize, trained
from cria_tricks.kwanzaa.prompt import read_rows
from cria_tricks.kwanzaa.scores import kind
from cria_tricks.settings import Data
from tools import curate

ROW = json.dumps({"prompt": "a", "completion": "b"}) + "\n"


def test_a_local_file_and_its_hash(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(ROW)
    found = sources.find(str(path), "train")
    assert len(found.rows) == 1
    assert hashlib.sha256(ROW.encode()).hexdigest() in found.description


@pytest.fixture
def public_repository(tmp_path, monkeypatch, online):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        sources, "_KWANZAA", (tmp_path / "kwanzaa_{part}.jsonl").as_uri().replace("%7B", "{").replace("%7D", "}")
    )
    monkeypatch.setitem(sources._SHA256, "train", hashlib.sha256(ROW.encode()).hexdigest())
    return tmp_path / "kwanzaa_train.jsonl"


def test_kwanzaa_is_downloaded_once_and_its_hash_checked(public_repository):
    public_repository.write_text(ROW)
    assert len(sources.find("kwanzaa", "train").rows) == 1
    public_repository.unlink()
    assert len(sources.find("kwanzaa", "train").rows) == 1, "the second time it comes from the cache"


def test_kwanzaa_with_another_content_is_refused(public_repository):
    public_repository.write_text(ROW * 2)
    with pytest.raises(BadInput, match="has sha256 .*, expected"):
        sources.find("kwanzaa", "train")


@pytest.fixture
def at_hand(real_data, tmp_path, monkeypatch):
    """The real files where a download would put them."""
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    shutil.copytree(real_data, tmp_path / "kwanzaa")


def test_the_curated_set_has_the_real_rows_that_answer_and_ours_behind_them(at_hand):
    parts = ("train", "eval")
    real = {part: sources.find("kwanzaa", part).rows for part in parts}
    ours = {part: sources.find("history_notes", part).rows for part in parts}
    found = {part: sources.find("kwanzaa_curated", part).rows for part in parts}
    kept = {part: found[part][: -len(ours[part])] for part in parts}
    assert {part: len(rows) for part, rows in kept.items()} == {"train": 38, "eval": 13}
    for part in parts:
        assert found[part][len(kept[part]) :] == ours[part]
        assert set(map(sources.row_hash, kept[part])) <= set(map(sources.row_hash, real[part]))
        assert "placeholder" not in map(kind, read_rows(found[part]))
    guard = Guard(real["eval"])
    assert not any(map(guard.find, kept["train"]))
    assert curate.chosen(real["train"], real["eval"]) == curate.CHOSEN.read_text().split()


def test_the_lengths_that_lessons_count_with_are_those_of_our_own_rows(tokenizer):
    """The last rows of the curated set are ours, so their lengths can be computed anywhere."""
    ours = sources.find("history_notes", "train", contract=True)
    assert row_lengths("curated")[-len(ours.rows) :] == _lengths(ours, tokenizer)


def test_the_lengths_that_lessons_count_with_are_those_of_the_real_rows(at_hand, tokenizer):
    assert row_lengths("train") == _lengths(sources.find("kwanzaa", "train"), tokenizer)
    assert row_lengths("eval") == _lengths(sources.find("kwanzaa", "eval"), tokenizer)
    assert row_lengths("curated") == _lengths(sources.find("kwanzaa_curated", "train", contract=True), tokenizer)


def _lengths(source: sources.DataSource, tokenizer) -> list[tuple[int, int]]:
    return [(len(row["input_ids"]), trained(row)) for row in tokenize(source.rows, tokenizer, 2048).rows]


def test_the_contract_takes_the_place_of_the_system_prompt(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "d.jsonl"
    begun = [{"role": "system", "content": "Be brief."}, *turns]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (turns, begun)))
    shown = sources.find(str(path), "train", contract=True)
    assert [row.messages for row in shown.rows] == [({"role": "system", "content": CONTRACT}, *turns)] * 2
    assert shown.description.endswith("; the contract is in every system prompt")
    assert sources.find(str(path), "train").rows[1].messages == tuple(begun)
    path.write_text(ROW)
    with pytest.raises(BadInput, match=r"data.contract=true: .*d.jsonl:1: is no chat"):
        sources.find(str(path), "train", contract=True)


def test_a_hub_data_set(monkeypatch):
    import datasets

    asked = []

    def load(name, split, streaming):
        asked.append((name, split))
        return datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    assert sources.find("owner/name", "train").rows[0].where == "owner/name:train row 1"
    sources.find("owner/name", "eval")
    sources.find("owner/name:train[:10%]", "eval")
    assert asked == [("owner/name", "train"), ("owner/name", "test"), ("owner/name", "train[:10%]")]


def test_our_own_set_a_file_and_texts_are_described(tmp_path):
    (tmp_path / "a.txt").write_text("Once.")
    (tmp_path / "d.jsonl").write_text(ROW)
    found = {name: sources.find(name, "eval").description for name in ("nguzo_saba", *map(str, tmp_path.iterdir()))}
    assert sources.find("nguzo_saba", "train").description == "cria_tricks nguzo_saba train, 32 rows (Apache-2.0)"
    assert found == {
        "nguzo_saba": f"cria_tricks nguzo_saba eval, {len(sources.find('nguzo_saba', 'eval').rows)} rows (Apache-2.0)",
        str(tmp_path / "a.txt"): "a.txt, 1 text files",
        str(tmp_path / "d.jsonl"): f"d.jsonl, 1 rows, sha256 {hashlib.sha256(ROW.encode()).hexdigest()}",
    }
    (tmp_path / "texts.txt").mkdir()
    (tmp_path / "texts.txt" / "b.txt").write_text("Twice.")
    assert sources.find(str(tmp_path / "texts.txt"), "eval").rows[0].text == "Twice.", "a folder whatever its name"


def test_rows_have_a_fingerprint_of_their_own():
    rows = [
        Chat(({"role": "user", "content": "a"},), "", "", "f:1"),
        Chat((), "p", "c", "f:2"),
        Chat((), "", "", "x", "t"),
    ]
    known = [
        json.dumps(row) for row in ([[{"role": "user", "content": "a"}], "", ""], [[], "p", "c"], [[], "", "", "t"])
    ]
    assert sources.DataSource(rows, "").sha256 == hashlib.sha256("".join(known).encode()).hexdigest()
    assert sources.DataSource(rows[1:], "").sha256 != sources.DataSource(rows[:0:-1], "").sha256


@pytest.mark.parametrize("name", ["owner/name", "owner/name:train", "o.w-n_1/n.a-m_2:train[:10%]"])
def test_names_of_the_hub(name):
    assert sources.place(name, "train") == name


@pytest.mark.parametrize("name", ["owner", "a/b/c", "a/b:", "a b/c", "a/b.jsonl", "a/b.json", "a/b.txt", "a/b:c d"])
def test_names_of_nothing(name):
    with pytest.raises(BadInput) as caught:
        sources.place(name, "train")
    assert str(caught.value) == (
        f"data.train={name}: no such file; give a .jsonl, .json, .csv, .tsv, .parquet or .txt file, a folder of .txt "
        "files, nguzo_saba, history_notes, kwanzaa, kwanzaa_curated, or a hub data set owner/name"
    )


def test_a_damaged_download_is_replaced_and_the_network_is_not_waited_for_for_ever(public_repository, monkeypatch):
    public_repository.write_text(ROW)
    honest, waits = sources.urllib.request.urlopen, []
    monkeypatch.setattr(
        sources.urllib.request, "urlopen", lambda url, timeout: waits.append(timeout) or honest(url, timeout=timeout)
    )
    kept = sources.place("kwanzaa", "train")
    kept.write_text("damaged")
    assert sources.place("kwanzaa", "train") == kept
    assert kept.read_text() == ROW
    assert [path.name for path in kept.parent.iterdir()] == ["kwanzaa_train.jsonl"]
    assert waits == [10, 10]
    found = sources.find("kwanzaa", "train").description
    sha256 = hashlib.sha256(ROW.encode()).hexdigest()
    assert found == f"AINative-Studio/kwanzaa kwanzaa_train.jsonl, sha256 {sha256} (GPL-3.0)"


@pytest.mark.parametrize(
    ("part", "splits", "taken"),
    [
        ("train", ["test", "train"], "train"),
        ("eval", ["train", "test", "eval", "validation"], "validation"),
        ("eval", ["test", "eval"], "eval"),
        ("eval", ["train", "test"], "test"),
        ("train", ["test", "validation"], None),
        ("eval", ["train"], None),
    ],
)
def test_the_split_of_a_hub_set(part, splits, taken, monkeypatch):
    import datasets

    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, streaming: rows)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: splits)
    if taken is None:
        with pytest.raises(BadInput) as caught:
            sources.find("owner/name", part)
        assert str(caught.value) == (
            f"data.{part}=owner/name: no such split; it has {', '.join(splits)}: name one as owner/name:SPLIT"
        )
        return
    found = sources.find("owner/name", part)
    assert found.description == f"owner/name ({taken}), 2 rows, from the Hugging Face hub"
    assert [row.where for row in found.rows] == [f"owner/name:{taken} row {number}" for number in (1, 2)]


def test_a_download_that_breaks_off_says_how_to_go_on(public_repository, monkeypatch):
    def open_url(url, timeout):
        raise sources.http.client.IncompleteRead(b"half")

    monkeypatch.setattr(sources.urllib.request, "urlopen", open_url)
    with pytest.raises(
        BadInput, match=r"^data.eval=kwanzaa: cannot download .* \(IncompleteRead\(4 bytes read\)\); with a"
    ):
        sources.find("kwanzaa", "eval")


def pairs(tmp_path, number: int) -> str:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "b"}) + "\n" for n in range(number)))
    return str(path)


@pytest.mark.parametrize(("rows", "held"), [(2, 1), (40, 2), (5000, 200)])
def test_without_a_name_some_training_rows_are_held_out(rows, held, tmp_path):
    data = Data(train=pairs(tmp_path, rows))
    train, held_out = sources.both(data, 0)
    assert (train.count, len(held_out.rows)) == (rows - held, held)
    assert {row.prompt for row in train.rows}.isdisjoint(row.prompt for row in held_out.rows)
    again, other = sources.both(data, 0)[1], sources.both(data, 1)[1]
    assert again.rows == held_out.rows
    assert other.rows != held_out.rows or rows == 2
    assert held_out.description.startswith(f"{held} row{'s' * (held > 1)} held out of d.jsonl, {rows} rows")


def test_a_row_that_is_there_twice_is_held_out_twice(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n % 10}", "completion": "b"}) + "\n" for n in range(40)))
    train, held_out = sources.both(Data(train=str(path)), 0)
    assert {row.key for row in train.rows}.isdisjoint(row.key for row in held_out.rows)


def test_a_named_set_has_its_own_evaluation_rows_and_one_row_cannot_be_divided(tmp_path):
    assert sources.both(Data(train="nguzo_saba"), 0)[1] == sources.find("nguzo_saba", "eval")
    with pytest.raises(BadInput, match="has too few rows to hold one out; set data.eval=FILE"):
        sources.both(Data(train=pairs(tmp_path, 1)), 0)
