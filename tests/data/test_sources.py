"""Where rows come from, with the network played by a local file."""

import hashlib
import json

import pytest

from cria_tricks.data import sources
from cria_tricks.errors import BadInput

ROW = json.dumps({"prompt": "a", "completion": "b"}) + "\n"


def test_a_local_file_and_its_hash(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(ROW)
    found = sources.find(str(path), "train")
    assert len(found.rows) == 1
    assert hashlib.sha256(ROW.encode()).hexdigest() in found.description


@pytest.mark.parametrize("name", ["missing.jsonl", "folder/missing.jsonl", "nguzo"])
def test_a_missing_file_says_what_there_is(name):
    with pytest.raises(BadInput, match="data.eval=.*no such file; give a .jsonl file, nguzo_saba, kwanzaa"):
        sources.find(name, "eval")


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(BadInput, match="holds no .txt file"):
        sources.find(str(tmp_path), "train")


@pytest.fixture
def public_repository(tmp_path, monkeypatch):
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


def test_kwanzaa_without_network_says_how_to_go_on(public_repository):
    with pytest.raises(BadInput, match="cannot download .* --set data.train=FILE.jsonl"):
        sources.find("kwanzaa", "train")


def test_a_hub_data_set(monkeypatch):
    import datasets

    asked = []

    def load(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    assert sources.find("owner/name", "train").rows[0].where == "owner/name:train row 0"
    sources.find("owner/name", "eval")
    sources.find("owner/name:train[:10%]", "eval")
    assert asked == [("owner/name", "train"), ("owner/name", "test"), ("owner/name", "train[:10%]")]


def test_a_hub_data_set_that_cannot_be_had(monkeypatch):
    import datasets

    def load(name, split):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(BadInput, match="owner/name:x: cannot be loaded from the hub: no route$"):
        sources.find("owner/name:x", "train")
