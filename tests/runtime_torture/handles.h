// Handles of tensors as the runtime makes and frees them: through libtorch's C ABI.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "must.h"

inline void* share(const void* tensor) {
  AtenTensorHandle made = nullptr;
  MUST(aoti_torch_new_tensor_handle(static_cast<AtenTensorHandle>(const_cast<void*>(tensor)), &made) == 0);
  return made;
}

inline void drop(void* tensor) { MUST(aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor)) == 0); }
