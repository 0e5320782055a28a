// The CUDA half of the shim: a shared object of its own, loaded after libtorch_cuda, whose symbols it uses.
//
// Every function is extern "C", returns 0 or 1 with a text in `precast_cuda_last_error`, and throws nothing.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

namespace {

thread_local std::string last_error;

template <class F>
int32_t guarded(F f) noexcept {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    try {
      last_error = e.what();
    } catch (...) {
    }
  } catch (...) {
    try {
      last_error = "an exception that is no std::exception";
    } catch (...) {
    }
  }
  return 1;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT const char* precast_cuda_last_error() { return last_error.c_str(); }

EXPORT int32_t precast_cuda_capability(int32_t device, int32_t* major, int32_t* minor) {
  return guarded([&] {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device));
  });
}

// The stream torch works on now, on this thread, on `device`.
EXPORT int32_t precast_cuda_current_stream(int32_t device, void** stream) {
  return guarded([&] { *stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream(); });
}

}  // extern "C"
