"""On a card: preparation computes there, and gives the bits that the CPU gives."""

import pytest
import torch

from moe_ops import load_moe_weights
from moe_ops.checkpoints import convert
from moe_ops.testing import assert_bits_equal
from moe_ops.testing.checkpoints import FORMATS, write_checkpoint

pytestmark = pytest.mark.gpu("tests/checkpoints/test_load.py")


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("name", FORMATS)
def test_load_on_a_card_is_load_on_the_cpu(tmp_path, name, arch):
    write_checkpoint(tmp_path / "src", name, K=640, I=192)
    want = load_moe_weights(tmp_path / "src", layer=0, arch=arch)
    convert(tmp_path / "src", tmp_path / "dst", arch=arch, device="cuda")
    for got in (
        load_moe_weights(tmp_path / "src", layer=0, arch=arch, device="cuda"),
        load_moe_weights(tmp_path / "dst", layer=0, device="cuda"),
    ):
        for field, tensor in want.tensors().items():
            other = got.tensors()[field]
            assert (other is None) == (tensor is None)
            if other is not None and tensor is not None:
                assert other.is_cuda
                assert_bits_equal(other.cpu(), tensor, field)
                if tensor.dtype == torch.int32:
                    assert other.stride() == tensor.stride()
