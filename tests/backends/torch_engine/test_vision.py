"""The image encoder: against transformers, against float64, and in whole runs.

The encoder of transformers is SigLIP with our weights; the projector and the place of images in the residual stream are
computed here, position by position, in float64. fp32 results agree to 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pictures import COLOURS, VISION, picture, picture_configuration
from tiny_runs import Killed
from vorox.api.model import create_model, load_model
from vorox.backends.torch_engine.device.results import TorchStepResult
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.layers.kernels import PLAIN
from vorox.backends.torch_engine.layers.vision import ImageEncoder, images_to_device
from vorox.core.batch import IGNORED_LABEL, Batch, BatchImages, DataCursor
from vorox.core.errors import DataError
from vorox.data.images.decoding import decode_image
from vorox.models.decoder.vision_spec import VisionSpec
from vorox.records.replay_chain import read_chain
from vorox.run import train

pytestmark = pytest.mark.torch

SPEC = VisionSpec(**VISION, intermediate_size=128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    made = create_model(picture_configuration(tmp_path_factory.mktemp("model")))
    generator = np.random.default_rng()
    made.engine.import_weights(  # biases and norms that count
        (name, (array + generator.normal(0, 0.1, array.shape)).astype(np.float32))
        for name, array in list(made.engine.export_weights())
    )
    return made


def weights_of(model) -> dict[str, np.ndarray]:
    return dict(model.engine.export_weights())


def siglip_vectors(weights: dict[str, np.ndarray], pixels: np.ndarray) -> np.ndarray:
    """The patches of transformers' SigLIP after its final norm, ``[images, patches, width]``."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4,
        hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, vision_use_head=False,
    )  # fmt: skip
    theirs = SiglipVisionModel(config).double().eval()
    names = {
        "patch_embedding": "embeddings.patch_embedding", "positions": "embeddings.position_embedding",
        "final_norm": "post_layernorm", "attention_norm": "layer_norm1", "mlp_norm": "layer_norm2",
        "mlp_up": "mlp.fc1", "mlp_down": "mlp.fc2", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
        "value": "self_attn.v_proj", "output": "self_attn.out_proj",
    }  # fmt: skip
    state = {key.rpartition("vision_model.")[2]: value for key, value in theirs.state_dict().items()}
    for name, array in weights.items():
        if not name.startswith("vision.") or "projector" in name:
            continue
        *path, kind = name.split(".")[1:]
        place = f"encoder.layers.{path[1]}." if path[0] == "blocks" else ""
        target = state[f"{place}{names[path[-1]]}.{kind}"]
        value = torch.from_numpy(array).double()
        if path[-1] == "patch_embedding" and kind == "weight":
            value = value.view(32, 3, 4, 4)
        target.copy_(value)
    scaled = torch.from_numpy(pixels).double().permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        return theirs(pixel_values=scaled).last_hidden_state.numpy()


def gelu(x: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


@pytest.mark.hf
def test_vectors_equal_siglip_and_a_projector_written_out(model) -> None:
    pixels = np.random.default_rng().integers(0, 256, (3, 16, 16, 3), np.uint8)
    weights = weights_of(model)
    patches = siglip_vectors(weights, pixels)
    expected: list[np.ndarray] = []
    for image in patches.reshape(3, 4, 4, 32):  # patches in rows and columns
        for row in (0, 2):
            for column in (0, 2):
                square = [image[row + dy, column + dx] for dy in (0, 1) for dx in (0, 1)]
                up = np.concatenate(square) @ weights["vision.projector.up.weight"].T.astype(np.float64)
                hidden = gelu(up + weights["vision.projector.up.bias"])
                down = hidden @ weights["vision.projector.down.weight"].T.astype(np.float64)
                expected.append(down + weights["vision.projector.down.bias"])
    with torch.no_grad():
        found = model.engine.model.vision.encode(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-5)


def test_vectors_take_the_place_of_embeddings_and_gradients_reach_the_pixels_encoder(model) -> None:
    token = model.tokenizer.special_id("<|image|>")
    tokens = np.array([[5, token, token, token, token, 6], [7, 8, token, token, token, token]], np.int32)
    pixels = np.random.default_rng().integers(0, 256, (2, 16, 16, 3), np.uint8)
    inputs = images_to_device(BatchImages(pixels, np.array([0, 1]), token), tokens, torch.device("cpu"))
    encoder = model.engine.model.vision
    x = torch.randn(12, 48, requires_grad=True)
    found = encoder(x, inputs)
    vectors = encoder.encode(torch.from_numpy(pixels))
    np.testing.assert_array_equal(found[[1, 2, 3, 4, 8, 9, 10, 11]].detach(), vectors.detach())
    np.testing.assert_array_equal(found[[0, 5, 6, 7]].detach(), x[[0, 5, 6, 7]].detach())
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.sum(1).tolist() == [48, 0, 0, 0, 0, 48, 48, 48, 0, 0, 0, 0]
    with pytest.raises(DataError, match="1 images of 4 tokens, but 8 positions"):
        encoder(x, images_to_device(BatchImages(pixels[:1], np.array([0]), token), tokens, torch.device("cpu")))


def test_gradients_of_hand_written_kernels_equal_those_of_autograd(model) -> None:
    parameters = {name: torch.nn.Parameter(p.detach().double()) for name, p in model.engine.parameters.modules.items()}
    plain = ImageEncoder(model.spec.vision, parameters, PLAIN)
    pixels = torch.from_numpy(np.random.default_rng().integers(0, 256, (2, 16, 16, 3), np.uint8))
    direction = torch.randn(8, 48)
    (plain.encode(pixels) * direction.double()).sum().backward()
    model.engine.parameters.zero_gradients()
    (model.engine.model.vision.encode(pixels) * direction).sum().backward()
    for name, parameter in model.engine.parameters.modules.items():
        if name.startswith("vision."):
            theirs = parameters[name].grad
            scale = float(theirs.abs().max())
            np.testing.assert_allclose(parameter.grad, theirs, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    model.engine.parameters.zero_gradients()


def test_decoding_with_a_cache_equals_whole_rows(model) -> None:
    token = model.tokenizer.special_id("<|image|>")
    ids = np.array([[65, 66, *[token] * 4, 67, 68, 69]], np.int32)
    found: list[np.ndarray] = []
    for colour in ("red", "blue"):
        images = BatchImages(decode_image(picture(colour, 1), 16)[None], np.array([0]), token)
        decoder = model.engine.decoder(1, 12, images)
        decoder.feed(ids[:, :7])
        found.append([decoder.feed(ids[:, place : place + 1]) for place in (7, 8)][-1])
        labels = np.full((1, 1, 9), IGNORED_LABEL, np.int32)
        digests = np.zeros((1, 1), np.uint64)
        batch = Batch(0, ids[None], labels, None, None, digests, 0, DataCursor("", 0, 1, 1, 0), (images,))
        with torch.no_grad():
            hidden_MD, head_VD = model.engine._network.hidden(batch, 0)
            expected_V = hidden_MD[-1] @ head_VD.T
        np.testing.assert_allclose(found[-1][0], expected_V, rtol=1e-4, atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.slow
class TestRuns:
    def test_a_killed_run_resumes_with_the_same_bits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        straight = train(picture_configuration(tmp_path / "a"), argv=["test"])
        original = TorchEngine.train_step

        def killed_at_step_7(self: TorchEngine, batch: Batch, **arguments: float | None) -> TorchStepResult:
            if batch.step == 6:
                raise Killed
            return original(self, batch, **arguments)

        with monkeypatch.context() as patch:
            patch.setattr(TorchEngine, "train_step", killed_at_step_7)
            with pytest.raises(Killed):
                train(picture_configuration(tmp_path / "b"), argv=["test"])
        resumed = train(picture_configuration(tmp_path / "b"), argv=["test"])
        assert resumed.start_step == 4
        assert resumed.fingerprint == straight.fingerprint
        chains = [[entry.chain for entry in read_chain(run.run_directory).values()] for run in (straight, resumed)]
        assert len(chains[0]) == 12
        assert chains[0] == chains[1]

    def test_an_encoder_is_added_to_the_weights_of_a_model_that_reads_text(self, tmp_path: Path) -> None:
        text = [
            "model.vision.num_layers=0",
            "data.sources.0.images_field=null",
            "data.sources.0.ignored_fields=[images]",
            "train.num_steps=2",
        ]
        first = train(picture_configuration(tmp_path / "a", text), argv=["test"])
        added = [f"train.from_weights={first.run_directory}", "train.num_steps=1", "optimizer.lr=1e-12"]
        second = train(picture_configuration(tmp_path / "b", added), argv=["test"])
        before, after = (dict(load_model(run.run_directory).engine.export_weights()) for run in (first, second))
        fresh = dict(create_model(picture_configuration(tmp_path / "b")).engine.export_weights())
        assert before.keys() < after.keys()
        for name, array in after.items():
            np.testing.assert_allclose(array, before.get(name, fresh[name]), atol=1e-6, err_msg=name)

    def test_a_trained_model_names_colours_that_only_the_picture_shows(self, tmp_path: Path) -> None:
        config = picture_configuration(
            tmp_path, ["train.num_steps=150", "train.global_batch_sequences=8", "eval.every_steps=null"]
        )
        outcome = train(config, argv=["test"])
        model = load_model(outcome.run_directory)
        for number, colour in enumerate(COLOURS):
            unseen = picture(colour, 5000 + number)
            text = model.generate("No. 77: <image> is", num_tokens=6, temperature=0, images=[unseen])
            assert text.startswith(f" {colour}"), (colour, text)


def test_an_own_block_beside_the_encoder_changes_nothing_of_it(tmp_path: Path) -> None:
    """The parameters of the encoder are stored fused, whatever the blocks of the decoder are."""
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self, spec):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(spec.hidden_size, spec.hidden_size)\n"
        "    def forward(self, x, positions=None, attn_mask=None):\n"
        "        return x + self.linear(x)\n"
        "def block(spec, layer):\n"
        "    return Block(spec)\n"
    )
    plain = create_model(picture_configuration(tmp_path))
    own = create_model(picture_configuration(tmp_path, [f"model.block={tmp_path / 'own.py'}:block"]))
    encoder = {name: array for name, array in weights_of(plain).items() if name.startswith("vision.")}
    found = weights_of(own)
    own.engine.import_weights((name, encoder.get(name, array)) for name, array in found.items())
    pixels = np.random.default_rng().integers(0, 256, (2, 16, 16, 3), np.uint8)
    vectors = []
    for made in (plain, own):
        module = made.engine.model.vision
        assert isinstance(module, ImageEncoder)
        vectors.append(module.encode(torch.from_numpy(pixels)))
    torch.testing.assert_close(vectors[1], vectors[0])
