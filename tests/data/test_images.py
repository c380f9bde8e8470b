"""Images of documents: from records to rows, and from rows to the pixels of a batch.

The oracle reads records and pictures itself, and finds them by the documents that the cache names for each row.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pictures import VISION, caption, picture, picture_configuration, write_pictures
from vorox.core.batch import IGNORED_LABEL, BatchImages, DataShard
from vorox.core.errors import DataError
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.documents import BadRecord, Document, PlacedImage, UnreadableRecord
from vorox.data.images.decoding import ImageInput, decode_image
from vorox.data.images.reading import ImageFolder, place_images, placed, read_images
from vorox.data.images.tokens import FIRST_IMAGE_ID, find_images, image_ids, one_id_per_image
from vorox.data.provenance.inspection import verify
from vorox.data.rows import assemble
from vorox.training.steps.dataloading import image_input, preview_batches, validation_set

IMAGE_TOKENS, SIZE = 4, VISION["image_size_pixels"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return picture_configuration(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def corpus(config: RunConfig) -> Corpus:
    return prepare(config)


class TestIds:
    def test_digests_are_found_in_rows_of_text_and_adjacent_images(self) -> None:
        generator = np.random.default_rng()
        digests = [int(value) for value in generator.integers(0, 1 << 64, 6, np.uint64)] + [0, (1 << 64) - 1]
        rows = [
            np.concatenate([[5, 6], *(image_ids(digest, 9) for digest in part), [7], np.full(60, 3)])[:60]
            for part in (digests[:3], [], digests[3:])
        ]
        found_rows, found = find_images(np.stack(rows).astype(np.uint32))
        assert found == digests
        assert found_rows.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]

    def test_an_image_is_one_token_for_people(self) -> None:
        ids = np.concatenate([[1], image_ids(99, 4), image_ids(98, 4), [2], image_ids(97, 7)])
        assert one_id_per_image(ids, 300).tolist() == [1, 300, 300, 2, 300]


class TestRecords:
    def test_forms_of_an_image(self) -> None:
        content = picture("red", 1)
        uri = "data:image/png;base64," + base64.b64encode(content).decode()
        forms = ["a.png", content, uri, {"bytes": content, "path": None}, {"bytes": None, "path": "b.png"}]
        found = [image.content for image in read_images(forms, "images")]
        assert found == ["a.png", content, content, content, "b.png"]
        assert read_images(None, "images") == ()
        assert read_images("a.png", "images")[0].content == "a.png"

    @pytest.mark.parametrize("value", [3, {"url": "x"}, "data:image/png;base64,***", [""]])
    def test_other_values_are_refused(self, value: object) -> None:
        with pytest.raises(UnreadableRecord, match="field 'images'"):
            read_images(value, "images")

    def test_marks_place_images_and_leave_the_text(self) -> None:
        images = (PlacedImage(b"a"), PlacedImage(b"b"))
        text = "q: <image> and <image>? answer"
        start = text.index("answer")
        placed = place_images(Document(0, 0, 0, 0, text, images=images, answers=((start, len(text)),)))
        assert placed.text == "q:  and ? answer"
        assert [placed.text[: image.character] for image in placed.images or ()] == ["q: ", "q:  and "]
        (answer,) = placed.answers
        assert placed.text[slice(*answer)] == "answer"

    def test_images_without_marks_come_first_and_others_must_match(self) -> None:
        document = Document(0, 0, 0, 0, "text", images=(PlacedImage(b"a"),))
        assert [image.character for image in place_images(document).images or ()] == [0]
        with pytest.raises(UnreadableRecord, match=r"1 times <image>, but the record has 2 images"):
            place_images(Document(0, 0, 0, 0, "<image>", images=(PlacedImage(b"a"), PlacedImage(b"b"))))

    @pytest.mark.parametrize("path", ["https://example.com/a.png", "s3://bucket/a.png", "ftp://host/a.png"])
    def test_a_path_leads_to_no_other_store(self, path: str) -> None:
        document = Document(0, 0, 0, 0, "", images=(PlacedImage(path),))
        found = placed(document, ImageFolder.of("/data/captions.jsonl", "captions.jsonl"))
        assert isinstance(found, BadRecord)
        assert "another store" in found.reason


class TestRows:
    def test_rows_hold_the_images_of_their_documents(self, config: RunConfig, corpus: Corpus) -> None:
        """Each image is found by its row's documents, decoded by Pillow alone, and compared with the batch."""
        reader, reads = corpus.train[0], image_input(config, corpus.tokenizer)
        assert reads == ImageInput(SIZE, corpus.tokenizer.special_id("<|image|>") or 0)
        folder = Path(config.data.sources[0].paths[0]).parent
        rows = np.arange(reader.num_rows)
        block = reader.read_rows(rows)
        batch = assemble(
            block, document_mask=True, step=0, cursor_after=None, num_micro_batches=1, image_input=reads
        )  # fmt: skip
        assert batch.images_A is not None
        (images,) = batch.images_A
        expected: list[np.ndarray] = []
        expected_rows: list[int] = []
        for row in rows.tolist():
            for document in reader.documents_of(row):
                for index, _ in enumerate(caption(document.ordinal)[1]):
                    with Image.open(folder / f"pictures/{document.ordinal}-{index}.png") as opened:
                        expected.append(np.asarray(opened.resize((SIZE, SIZE), Image.Resampling.BICUBIC)))
                    expected_rows.append(row)
        assert len(expected) > 40
        np.testing.assert_array_equal(images.pixels_ISSC, np.stack(expected))
        assert images.rows_I.tolist() == expected_rows
        assert np.count_nonzero(batch.tokens_ABT == reads.token_id) == len(expected) * IMAGE_TOKENS
        assert batch.tokens_ABT.max() < corpus.tokenizer.vocab_size

    def test_images_are_no_targets_and_all_text_is(self, config: RunConfig, corpus: Corpus) -> None:
        with preview_batches(config, corpus, DataShard(), 1) as batches:
            batch = next(batches)
        token = image_input(config, corpus.tokenizer).token_id  # type: ignore[union-attr]
        assert not (batch.labels_ABT == token).any()
        is_next_image = np.zeros_like(batch.tokens_ABT, bool)
        is_next_image[..., :-1] = batch.tokens_ABT[..., 1:] == token
        is_inside = batch.segment_ids_ABT != 0
        is_last = np.ones_like(is_inside)
        is_last[..., :-1] = batch.segment_ids_ABT[..., 1:] != batch.segment_ids_ABT[..., :-1]
        assert ((batch.labels_ABT != IGNORED_LABEL) == (is_inside & ~is_next_image & ~is_last))[..., :-1].all()

    def test_the_digest_of_a_row_covers_the_bytes_of_its_images(self, tmp_path: Path) -> None:
        digests: list[int] = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            write_pictures(tmp_path / name / "text", records=2)
            for path in (tmp_path / name / "text" / "pictures").iterdir():
                path.write_bytes(picture("red", seed))
            config = picture_configuration(tmp_path / name, ["data.validation.held_out_fraction=0"])
            opened = prepare(config)
            block = opened.train[0].read_rows(np.arange(1))
            batch = assemble(
                block, document_mask=True, step=0, cursor_after=None,
                image_input=image_input(config, opened.tokenizer),
            )  # fmt: skip
            digests.append(int(batch.row_digests_AB[0, 0]))
        assert digests[0] == digests[1] != digests[2]

    def test_parquet_with_bytes_gives_the_rows_of_jsonl_with_paths(self, config: RunConfig, tmp_path: Path) -> None:
        folder = Path(config.data.sources[0].paths[0]).parent
        lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
        images = [[{"bytes": (folder / path).read_bytes(), "path": path} for path in line["images"]] for line in lines]
        table = pa.table({"text": [line["text"] for line in lines], "images": images})
        (tmp_path / "text").mkdir()
        pq.write_table(table, tmp_path / "text" / "captions.parquet", row_group_size=30)
        (tmp_path / "text" / "captions.jsonl").write_text("{}\n")  # only the Parquet file is read
        other = picture_configuration(
            tmp_path,
            ["data.sources.0.format=parquet", f"data.sources.0.paths=[{tmp_path / 'text' / 'captions.parquet'}]",
             "data.validation.held_out_fraction=0", "data.cache.unit_bytes=1000000"],
        )  # fmt: skip
        same = picture_configuration(
            folder.parent, ["data.validation.held_out_fraction=0", "data.cache.unit_bytes=1000000"]
        )
        ours, theirs = (prepare(each).train[0] for each in (other, same))
        assert ours.num_rows == theirs.num_rows
        rows = np.arange(ours.num_rows)
        here, there = ours.read_rows(rows), theirs.read_rows(rows)
        np.testing.assert_array_equal(np.sort(here.tokens_NC, 0), np.sort(there.tokens_NC, 0))
        assert here.images == there.images

    def test_a_shard_has_the_images_of_its_rows(self) -> None:
        pixels = np.arange(5)[:, None, None, None].repeat(3, -1).astype(np.uint8)
        images = BatchImages(pixels, np.array([0, 0, 2, 3, 3]), 9)
        part = images.of_rows(np.array([3, 1, 0]))
        assert part.pixels_ISSC[:, 0, 0, 0].tolist() == [3, 4, 0, 1]
        assert part.rows_I.tolist() == [0, 0, 2, 2]

    def test_the_validation_set_has_images(self, config: RunConfig, corpus: Corpus) -> None:
        open_batches = validation_set(config, corpus)
        assert open_batches is not None
        assert sum(len(batch.images_A[0].pixels_ISSC) for batch in open_batches() if batch.images_A) > 0

    def test_verification_reads_the_pictures_again(self, corpus: Corpus) -> None:
        verify(corpus)


class TestBadImages:
    def test_unreadable_images_are_quarantined_with_their_reason(self, tmp_path: Path) -> None:
        write_pictures(tmp_path / "text", records=40)
        folder = tmp_path / "text" / "pictures"
        (folder / "2-0.png").write_bytes(b"no picture")
        (folder / "3-0.png").write_bytes((folder / "3-0.png").read_bytes()[:60])
        (folder / "4-0.png").unlink()
        with (tmp_path / "text" / "captions.jsonl").open("a") as file:
            file.write(json.dumps({"text": "<image> " + "long " * 30, "images": ["pictures/7-0.png"]}) + "\n")
            file.write(json.dumps({"text": "<image> <image>", "images": ["pictures/7-0.png"]}) + "\n")
        config = picture_configuration(
            tmp_path, ["data.sources.0.bad_record_fraction=1", "data.validation.held_out_fraction=0"]
        )
        reader = prepare(config).train[0]
        files = sorted(path for path in (reader.directory / "quarantine").rglob("*") if path.is_file())
        text = "".join(path.read_text() for path in files)
        for reason in (
            "it is no PNG, JPEG", "cannot be decoded", "cannot be read: No such file", "increase", "2 times <image>",
        ):  # fmt: skip
            assert reason in text
        assert text.count('"reason"') == 5

    def test_a_damaged_or_missing_image_of_the_cache_is_an_error(self, tmp_path: Path) -> None:
        reader = prepare(picture_configuration(tmp_path)).train[0]
        reader.repair = None
        stored = sorted((reader.directory / "images").rglob("?" * 16))
        assert stored
        stored[0].write_bytes(stored[0].read_bytes() + b"x")
        with pytest.raises(DataError, match="does not match its hash"):
            reader.read_rows(np.arange(reader.num_rows))
        stored[0].unlink()
        with pytest.raises(DataError, match="cannot be read"):
            reader.read_rows(np.arange(reader.num_rows))

    def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vorox.data.images.decoding.MAX_PIXELS", 100)
        with pytest.raises(ValueError, match="20 x 12 pixels"):
            decode_image(picture("red", 1), 4)


def test_ids_of_images_are_above_every_vocabulary(corpus: Corpus) -> None:
    recipe = corpus.train[0].recipe
    assert recipe.vocab_size < FIRST_IMAGE_ID < recipe.num_ids
    assert recipe.dtype == "uint32"
