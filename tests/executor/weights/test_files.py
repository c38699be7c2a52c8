"""Initial weights from files: every kind gives the same numbers, by parts; wrong files are refused in one sentence."""

from __future__ import annotations

import json
import struct
import zipfile

import numpy as np
import pytest
import torch

from executor.train.options import RunOptions
from executor.train.run import run_rank
from executor.weights.files import check_weights, read_weights
from plans.errors import TwofoldError
from plans.lower import lower
from tests.support.small_training import batches, graph, one_rank, parameters


def write_safetensors(path, arrays):
    """The format by its description: the length of a header, the header in JSON, the bytes of all tensors."""
    header, data = {}, b""
    for name, array in arrays.items():
        content = array.tobytes()
        places = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": places}
        data += content
    said = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(said)) + said + data)


@pytest.fixture(params=["npz", "pt", "safetensors", "folder"])
def weights(request, tmp_path):
    arrays = parameters()
    path = tmp_path / f"weights.{request.param}"
    if request.param == "npz":
        np.savez(path, **arrays)
    elif request.param == "pt":
        torch.save({name: torch.tensor(array) for name, array in arrays.items()}, path)
    else:
        if request.param == "folder":
            path.mkdir()
            for number, name in enumerate(arrays):
                write_safetensors(path / f"model-{number}.safetensors", {name: arrays[name]})
        else:
            write_safetensors(path, arrays)
    return str(path)


def test_training_begins_with_the_weights_of_a_file(weights):
    check_weights(weights, graph())
    read = read_weights(weights)
    assert sorted(read) == sorted(parameters()) and np.array_equal(read["w1"][2:5, 1:], parameters()["w1"][2:5, 1:])
    plan, options = one_rank(), RunOptions(count=False, record_steps=0)
    ran = [
        run_rank(lower(plan), plan, iter(batches(3)), given, 3, device="cpu", options=options).losses
        for given in (read, parameters())
    ]
    assert np.array_equal(*ran)


def test_half_precision_keeps_its_numbers(tmp_path):
    torch.save({"w": torch.tensor([1.0, 1 + 2**-7], dtype=torch.bfloat16)}, tmp_path / "w.pt")
    assert read_weights(str(tmp_path / "w.pt"))["w"][...].tolist() == [1.0, 1 + 2**-7]


def test_wrong_files_are_refused(tmp_path):
    def refused(name, says):
        with pytest.raises(TwofoldError, match=says) as error:
            check_weights(str(tmp_path / name), graph())
        assert "\n" not in str(error.value)

    refused("nothing.pt", "there is no such file or folder")
    (tmp_path / "empty").mkdir()
    refused("empty", "the folder has no .safetensors file")
    (tmp_path / "other.bin").write_bytes(b"no pickle")
    refused("other.bin", "torch.load cannot read a state_dict")
    (tmp_path / "other.txt").write_bytes(b"")
    refused("other.txt", "it must be a .safetensors file or folder, .pt, .pth, .bin or .npz")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    refused("list.pt", "it must be a state_dict")
    np.savez(tmp_path / "less.npz", w1=parameters()["w1"])
    refused("less.npz", "lack the parameter 'b1'; they have 1 tensors: w1")
    np.savez(tmp_path / "shape.npz", **parameters() | {"w2": np.zeros((3, 3), np.float32)})
    refused("shape.npz", r"'w2' has the shape \(3, 3\), the plan \(2, 8\)")


def test_a_state_dict_with_a_damaged_tensor_is_refused(tmp_path):
    torch.save({"w": torch.zeros(3)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "bad.pt", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith("data.pkl"):
                assert content.count(b"K\x01\x85") == 1  # the strides, a tuple of one number
                content = content.replace(b"K\x01\x85", b"K\x01")
            bad.writestr(name, content)
    with pytest.raises(TwofoldError, match=r"torch\.load cannot read a state_dict from it"):
        read_weights(str(tmp_path / "bad.pt"))
