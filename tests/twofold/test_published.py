"""A config.json that no `TransformerConfig` can say is planned as the module that transformers builds from it."""

import json

import pytest

from plans.errors import TwofoldError
from tests import DATA
from twofold.cli import main
from twofold.commands.models import given_model

FOLDER = DATA / "configs"
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "d_model": 64,
    "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 256,
    "pad_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32, "patch_size": 8, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    def write(keys):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(keys))
        return str(path)

    return write


def test_without_transformers_the_error_suggests_it(monkeypatch):
    monkeypatch.setattr("executor.weights.published.has_transformers", lambda: False)
    with pytest.raises(
        TwofoldError, match=r"t5: encoder-decoder models .*; install transformers to plan the module that it builds"
    ):
        given_model(str(FOLDER / "t5-base.json"))


def test_a_file_that_a_configuration_expresses_is_never_built():
    assert given_model(str(FOLDER / "gpt-oss-20b.json"), 64).graph is None


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("keys", "inputs"),
    [(T5 | {"num_layers": 1}, "int64 [64, 16]"), (VIT | {"num_hidden_layers": 1}, "float32 [64, 3, 32, 32]")],
)
def test_the_module_is_planned_and_trains_as_in_one_process(keys, inputs, file, tmp_path, capsys):
    path, plan = file(keys), str(tmp_path / "plan.json")
    seq = ["--seq", "16"] if "d_model" in keys else []
    assert (
        main(["plan", path, *seq, "--machine", "cpu-2core-x8", "--devices", "2", "--global-batch", "8", "--out", plan])
        == 0
    )
    assert f"Planning the module that transformers builds, with {inputs}" in capsys.readouterr().out
    assert main(["verify", plan, "--model", path, "--steps", "2"]) == 0  # losses and weights are compared


def test_fewer_blocks_are_those_of_encoder_and_decoder(file):
    names = given_model(file(T5), 16, 1).graph.by_name
    blocks = {name.split(".block.")[0] + name.split(".block.")[1][0] for name in names if ".block." in name}
    assert blocks == {"net.decoder0", "net.encoder0"}


@pytest.mark.parametrize(
    ("keys", "seq", "message"),
    [
        (T5 | {"model_type": "no-such"}, None, "transformers .* cannot build this model"),
        (T5 | {"d_model": "wide"}, None, "transformers .* cannot build this model"),
        (VIT, 16, "--seq is for text; samples are images of 32 x 32 pixels"),
        (T5 | {"torch_dtype": "float7"}, None, "transformers .* cannot build this model .*float7"),
    ],
)
def test_unbuildable_models_are_refused(keys, seq, message, file):
    with pytest.raises(TwofoldError, match=message):
        given_model(file(keys), seq, None)
