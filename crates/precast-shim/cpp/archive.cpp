// Eager of stores that were built before graphs were kept as lists of calls: archives of torch.export, run by libtorch's
// own interpreter, where libtorch has one.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

int32_t precast_guarded(const std::function<int32_t()>& f) noexcept;

// The last version of torch that has the interpreter is 2.LAST.
#define LAST 11

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= LAST
// libtorch_cpu exports this class; its header is not in the wheel. One pointer is all it has.
namespace torch::nativert {
class ModelRunner;
class ModelRunnerHandle {
 public:
  ModelRunnerHandle(const std::string& package, const std::string& model);
  ModelRunnerHandle(const ModelRunnerHandle&) = delete;
  ~ModelRunnerHandle();
  std::vector<c10::IValue> runWithFlatInputsAndOutputs(std::vector<c10::IValue> inputs);

 private:
  ModelRunner* impl_;
};
}  // namespace torch::nativert

using Interpreter = torch::nativert::ModelRunnerHandle;
#else
// Never made: `precast_archive_new` refuses.
struct Interpreter {
  Interpreter(const std::string&, const std::string&) {
    throw std::runtime_error(
        "its graph is an archive of an earlier version of Precast, which libtorch " TORCH_VERSION
        " can't run: build the model again, with this torch");
  }
  std::vector<c10::IValue> runWithFlatInputsAndOutputs(std::vector<c10::IValue> inputs) { return inputs; }
};
#endif

extern "C" {

int32_t precast_archive_new(const char* path, void** made) {
  return precast_guarded([&] {
    *made = new Interpreter(path, "model");
    return 0;
  });
}
void precast_archive_delete(void* handle) {
  precast_guarded([&] {
    delete static_cast<Interpreter*>(handle);
    return 0;
  });
}
// Inputs are borrowed; outputs are new handles, the caller's.
int32_t precast_archive_run(void* handle, void* const* inputs, size_t n_in, void** outputs, size_t n_out) {
  return precast_guarded([&] {
    c10::NoGradGuard no_grad;
    std::vector<c10::IValue> values;
    values.reserve(n_in);
    for (size_t i = 0; i < n_in; i++) values.emplace_back(*static_cast<const at::Tensor*>(inputs[i]));
    auto answers = static_cast<Interpreter*>(handle)->runWithFlatInputsAndOutputs(std::move(values));
    if (answers.size() != n_out)
      throw std::runtime_error(
          "the archive gives " + std::to_string(answers.size()) + " outputs, its record says " + std::to_string(n_out));
    for (const auto& answer : answers)
      if (!answer.isTensor()) throw std::runtime_error("an output of the archive is no tensor");
    for (size_t i = 0; i < n_out; i++) {
      // It runs in inference mode, whose tensors nobody may write to; the caller's may be.
      const at::Tensor& answer = answers[i].toTensor();
      outputs[i] = new at::Tensor(answer.is_inference() ? answer.clone() : answer);
    }
    return 0;
  });
}

}  // extern "C"
