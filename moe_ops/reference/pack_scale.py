"""Reference of moe::pack_scale."""

import torch

from moe_ops.reference.quantize import exponent_byte, pack_words


def pack_scale(outputs, *, scale, mn, rows_per_scale, scale_format) -> None:
    (packed,) = outputs
    if scale_format == "ue8m0":
        scale = pack_words(scale.view(torch.uint8) if scale.dtype != torch.float32 else _exact_bytes(scale))
    row = torch.arange(mn, device=scale.device) // rows_per_scale
    packed.copy_(scale.index_select(-2, row))


def _exact_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Exponent bytes of scales that are powers of two. Rounding here would change what the values mean."""
    bits = scale.contiguous().view(torch.int32)
    wrong = ((bits & 0x7FFFFF) != 0) | (bits <= 0) | (bits >= 255 << 23)
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"pack_scale: scale must be positive powers of two for ue8m0; got {scale[index].item()!r} at {index}. "
            "Requantise the values with power-of-two scales: moe_ops.quantize(..., scale_format='ue8m0')."
        )
    return exponent_byte(scale)
