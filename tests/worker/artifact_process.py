"""The process that `artifact.run` starts: libtorch and an artifact through ctypes, no `import torch`."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from typing import Any

NAMES = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
NAMES |= {"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
Handle = ctypes.c_void_p


class Pair(ctypes.Structure):
    """`AOTInductorConstantMapEntry`."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", Handle))


class Torch:
    """The few functions of libtorch's C shim that are needed."""

    def __init__(self, folder: str, device: str) -> None:
        self.shim = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        if device != "cpu":
            ctypes.CDLL(os.path.join(folder, "libtorch_cuda.so"), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        self.dtypes = {name: getattr(self.shim, f"aoti_torch_dtype_{name}")() for name in NAMES.values()}
        self.device = device

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.shim, f"aoti_torch_{name}")(*arguments) == 0, name

    def empty(self, dtype: str, shape: list[int], where: str) -> Handle:
        made = Handle()
        kind = getattr(self.shim, f"aoti_torch_device_type_{where.partition(':')[0]}")()
        layout = (ctypes.c_int64(len(shape)), longs(shape), longs(dense(shape)))
        self.call(
            "empty_strided", *layout, ctypes.c_int32(self.dtypes[dtype]), ctypes.c_int32(kind), 0, ctypes.byref(made)
        )
        return made

    def tensor(self, dtype: str, shape: list[int], data: bytes) -> Handle:
        """Returns a tensor with these bytes on the device."""
        made = self.empty(dtype, shape, "cpu")
        ctypes.memmove(self.pointer(made), data, len(data))
        return made if self.device == "cpu" else self.moved(made, dtype, shape, self.device)

    def moved(self, source: Handle, dtype: str, shape: list[int], where: str) -> Handle:
        made = self.empty(dtype, shape, where)
        self.call("copy_", made, source, ctypes.c_int32(0))
        return made

    def pointer(self, tensor: Handle) -> int:
        found = ctypes.c_void_p()
        self.call("get_data_ptr", tensor, ctypes.byref(found))
        return found.value or 0

    def numbers(self, tensor: Handle, what: str) -> list[int]:
        count, found = ctypes.c_int64(), ctypes.POINTER(ctypes.c_int64)()
        self.call("get_dim", tensor, ctypes.byref(count))
        self.call(f"get_{what}", tensor, ctypes.byref(found))
        return [found[index] for index in range(count.value)]


def longs(values: list[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def dense(shape: list[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def read(torch: Torch, path: str) -> dict[str, Handle]:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = torch.tensor(NAMES[entry["dtype"]], entry["shape"], data[begin:end])
    return found


def main() -> None:
    job = json.load(sys.stdin)
    torch = Torch(job["torch"], job["device"])
    given = read(torch, job["given"])
    code = ctypes.CDLL(job["library"], mode=os.RTLD_NOW | os.RTLD_LOCAL)
    container = Handle()

    def call(name: str, *arguments: Any) -> None:
        assert getattr(code, f"AOTInductorModelContainer{name}")(*arguments) == 0, name

    call("CreateWithDevice", ctypes.byref(container), ctypes.c_size_t(1), job["device"].encode(), None)
    count = ctypes.c_size_t()
    call("GetNumConstants", container, ctypes.byref(count))
    pairs = (Pair * max(count.value, 1))()
    for index in range(count.value):
        name, original = ctypes.c_char_p(), ctypes.c_char_p()
        call("GetConstantName", container, ctypes.c_size_t(index), ctypes.byref(name))
        call("GetConstantOriginalFQN", container, ctypes.c_size_t(index), ctypes.byref(original))
        pairs[index] = Pair(name.value, given[f"w.{(original.value or b'').decode()}"].value)
    flags = (ctypes.c_size_t(count.value), ctypes.c_bool(False), ctypes.c_bool(True))
    call("UpdateUserManagedConstantBufferPairs", container, pairs, *flags)
    inputs = (Handle * max(job["inputs"], 1))(*[given[f"in.{index}"].value for index in range(job["inputs"])])
    made = (Handle * job["outputs"])()
    counts = (ctypes.c_size_t(job["inputs"]), made, ctypes.c_size_t(job["outputs"]))
    call("Run", container, inputs, *counts, None, None)
    names = {value: name for name, value in torch.dtypes.items()}
    answer = []
    with open(job["answer"], "wb") as file:
        for handle in made:
            tensor, dtype = Handle(handle), ctypes.c_int32()
            torch.call("get_dtype", tensor, ctypes.byref(dtype))
            shape, stride = torch.numbers(tensor, "sizes"), torch.numbers(tensor, "strides")
            plain = torch.moved(tensor, names[dtype.value], shape, "cpu")
            begin = file.tell()
            file.write(ctypes.string_at(torch.pointer(plain), math.prod(shape) * BYTES.get(names[dtype.value], 1)))
            entry = {"dtype": names[dtype.value], "shape": shape, "stride": stride, "begin": begin, "end": file.tell()}
            answer.append(entry)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
