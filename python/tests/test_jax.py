"""Arrays of JAX. Run where `jax` is installed; its wheels are no requirement of the tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import python

CODE = """
import sys
import jax, precast
from jax import numpy as jnp

jax.config.update("jax_enable_x64", True)
with precast.load(sys.argv[1], "tiny") as model:
    ids, mask = jnp.arange(12).reshape(3, 4), jnp.ones((3, 4), dtype=jnp.int64)
    out = model.encode(ids, mask)
    assert isinstance(out, jax.Array) and out.shape == (3, 8)
    assert (model.encode(mask=mask, ids=ids) == out).all()
    assert jax.jit(lambda array: array * 2)(out).dtype == out.dtype
    x = jnp.ones((4, 3), dtype=jnp.float32)
    nested = model.nested(x, [x + 1, x - 1], jnp.full((1,), 2.0, dtype=jnp.float32))
    assert (nested["sum"] == 6).all() and (nested["pair"].low == 0).all()
    assert precast.Tensor.from_dlpack(x).data_ptr == x.unsafe_buffer_pointer()
    try:
        model.encode(ids.astype(jnp.float32), mask)
        raise SystemExit("a wrong dtype was taken")
    except precast.BadInput as error:
        assert "expected dtype int64" in str(error)
    print("torch" in sys.modules, (out == jnp.asarray(model.encode(ids.__array__(), mask.__array__()))).all())
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_arrays_of_jax_are_read_in_place_and_come_back(store: Path) -> None:
    assert python(CODE, store).split() == ["False", "True"]
