// The executor of operators without a C entry point: custom ones, and a few of torch's.
//
// libtorch's executor of these calls (OSSProxyExecutor) is not exported and reads a file. This one has the same rules:
// a call's numbers and tensors come at run time, in the schema's order; everything else is fixed when it is made.

#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_torch/proxy_executor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "operators.h"

int32_t precast_guarded(const std::function<int32_t()>& f) noexcept;

namespace {

using namespace precast;

// An argument that comes with the call.
struct Filled {
  enum What { OneTensor, Tensors, OptionalTensors, OneInt, Ints } what;
  size_t at;
  // For tensors that may be missing: which are there.
  std::vector<bool> given;
  size_t count = 1;
};

struct Operator {
  c10::OperatorHandle handle;
  std::vector<IValue> stack;
  std::vector<Filled> slots;

  explicit Operator(c10::OperatorHandle handle) : handle(std::move(handle)) {}

  void dynamic(Filled::What what, size_t count, std::vector<bool> given = {}) {
    slots.push_back({what, stack.size(), std::move(given), count});
    stack.emplace_back();
  }
};

class Executor : public torch::aot_inductor::ProxyExecutor {
 public:
  explicit Executor(c10::Device device) : device_(device) {}

  void add(const char* name, const char* overload, const PrecastArgument* given, size_t n) {
    auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!handle) refuse("no loaded library registers it");
    Operator op(*handle);
    size_t used = 0;
    for (const c10::Argument& wanted : handle->schema().arguments()) {
      const PrecastArgument* found = nullptr;
      for (size_t i = 0; i < n; i++)
        if (wanted.name() == given[i].name) found = &given[i];
      try {
        if (found) {
          used++;
          argument(op, wanted.real_type(), *found);
        } else if (wanted.default_value()) {
          fallback(op, wanted.real_type(), *wanted.default_value());
        } else {
          refuse("it has no value");
        }
      } catch (const std::exception& error) {
        refuse("argument `" + wanted.name() + "`: " + error.what());
      }
    }
    if (used != n) refuse("it was compiled with arguments that its schema does not have");
    operators_.push_back(std::move(op));
  }

  bool writes() const {
    for (const Operator& op : operators_)
      if (op.handle.schema().is_mutable()) return true;
    return false;
  }

  void call_function(int index, int n_ints, int64_t* ints, int n_tensors, AtenTensorHandle* handles) override {
    if (index < 0 || static_cast<size_t>(index) >= operators_.size()) refuse("operator call without a description");
    const Operator& op = operators_[index];
    std::vector<IValue> stack = op.stack;
    int next_int = 0, next_tensor = 0;
    auto integer = [&] {
      if (next_int >= n_ints) refuse(named(op) + " got too few numbers");
      return ints[next_int++];
    };
    auto tensor = [&]() -> at::Tensor& {
      if (next_tensor >= n_tensors) refuse(named(op) + " got too few tensors");
      return *reinterpret_cast<at::Tensor*>(handles[next_tensor++]);
    };
    for (const Filled& slot : op.slots) {
      switch (slot.what) {
        case Filled::OneTensor: stack[slot.at] = tensor(); break;
        case Filled::OneInt: stack[slot.at] = integer(); break;
        case Filled::Tensors: {
          c10::List<at::Tensor> list;
          for (size_t i = 0; i < slot.count; i++) list.push_back(tensor());
          stack[slot.at] = std::move(list);
          break;
        }
        case Filled::OptionalTensors: {
          c10::List<std::optional<at::Tensor>> list;
          for (bool there : slot.given) list.push_back(there ? std::optional<at::Tensor>(tensor()) : std::nullopt);
          stack[slot.at] = std::move(list);
          break;
        }
        case Filled::Ints: {
          c10::List<int64_t> list;
          for (size_t i = 0; i < slot.count; i++) list.push_back(integer());
          stack[slot.at] = std::move(list);
          break;
        }
      }
    }
    op.handle.callBoxed(stack);
    // Its results go into the other handles, in order. Missing results, and results that are no tensors, have no
    // handle.
    for (const IValue& answer : stack) {
      if (answer.isTensor()) {
        // A tensor that was only changed in place may have no handle.
        if (next_tensor < n_tensors) tensor() = answer.toTensor();
      } else if (answer.isTensorList()) {
        for (const at::Tensor& one : answer.toTensorVector()) tensor() = one;
      } else if (!answer.isNone() && !answer.isInt()) {
        refuse(named(op) + " returned what an artifact can't take");
      }
    }
    if (next_tensor != n_tensors) refuse(named(op) + " took " + std::to_string(next_tensor) + " tensors of " + std::to_string(n_tensors));
  }

 private:
  static std::string named(const Operator& op) { return "operator `" + toString(op.handle.operator_name()) + "`"; }

  void argument(Operator& op, const TypePtr& declared, const PrecastArgument& given) {
    if (given.kind == NONE) return op.stack.emplace_back(), void();
    const TypePtr type = plain(declared);
    const TypePtr of = element(type);
    auto need = [&](bool right) {
      if (!right) refuse("it was compiled with another type than `" + declared->str() + "`");
    };
    if (of) return list(op, of, given, need);
    switch (type->kind()) {
      case TypeKind::TensorType: need(given.kind == TENSOR); return op.dynamic(Filled::OneTensor, 1);
      case TypeKind::IntType:
      case TypeKind::SymIntType: need(given.kind == INT); return op.dynamic(Filled::OneInt, 1);
      case TypeKind::NumberType:
        if (given.kind == INT) return op.dynamic(Filled::OneInt, 1);
        break;
      default: break;
    }
    const Fixed value{
        given.kind, given.n_ints ? given.ints[0] : 0, given.n_floats ? given.floats[0] : 0, given.text};
    op.stack.push_back(fixed(type, value, device_));
  }

  template <class Need>
  static void list(Operator& op, const TypePtr& of, const PrecastArgument& given, Need need) {
    // An empty list has no type of its own.
    const bool empty = given.n_ints == 0 && given.n_floats == 0 && given.kind != TENSORS;
    if (of->kind() == TypeKind::TensorType) {
      need(given.kind == TENSORS || empty);
      return op.dynamic(Filled::Tensors, given.kind == TENSORS ? static_cast<size_t>(given.ints[0]) : 0);
    }
    if (of->kind() == TypeKind::OptionalType) {
      need(plain(of)->kind() == TypeKind::TensorType);
      std::vector<bool> there;
      if (given.kind == TENSORS) there.assign(static_cast<size_t>(given.ints[0]), true);
      else need(given.kind == OPTIONAL_TENSORS || empty);
      if (given.kind == OPTIONAL_TENSORS)
        for (size_t i = 0; i < given.n_ints; i++) there.push_back(given.ints[i] != 0);
      return op.dynamic(Filled::OptionalTensors, 0, std::move(there));
    }
    if (integral(of) || (of->kind() == TypeKind::NumberType && given.kind == INTS)) {
      need(given.kind == INTS || empty);
      return op.dynamic(Filled::Ints, given.kind == INTS ? given.n_ints : 0);
    }
    if (of->kind() == TypeKind::FloatType || of->kind() == TypeKind::NumberType) {
      need(given.kind == FLOATS || empty);
      c10::List<double> values;
      for (size_t i = 0; i < given.n_floats; i++) values.push_back(given.floats[i]);
      op.stack.emplace_back(std::move(values));
      return;
    }
    need(of->kind() == TypeKind::BoolType && (given.kind == BOOLS || empty));
    c10::List<bool> values;
    for (size_t i = 0; i < given.n_ints; i++) values.push_back(given.ints[i] != 0);
    op.stack.emplace_back(std::move(values));
  }

  // A default is not in the description, but a number among them comes with the call like any other.
  static void fallback(Operator& op, const TypePtr& declared, const IValue& value) {
    const TypePtr type = plain(declared);
    if (value.isInt() && (integral(type) || type->kind() == TypeKind::NumberType)) return op.dynamic(Filled::OneInt, 1);
    if (value.isIntList() && integral(element(type))) return op.dynamic(Filled::Ints, value.toIntVector().size());
    op.stack.push_back(value);
  }

  c10::Device device_;
  std::vector<Operator> operators_;
};

}  // namespace

extern "C" {

// Calls `each` with the name of every operator of the process, as `namespace::name`.
int32_t precast_operator_names(void (*each)(void*, const char*), void* context) {
  return precast_guarded([&] {
    for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) each(context, op.name.c_str());
    return 0;
  });
}

int32_t precast_operators_new(const char* device, void** made) {
  return precast_guarded([&] {
    *made = static_cast<torch::aot_inductor::ProxyExecutor*>(new Executor(c10::Device(device)));
    return 0;
  });
}

int32_t precast_operators_add(void* self, const char* name, const char* overload, const PrecastArgument* given, size_t n) {
  return precast_guarded([&] {
    static_cast<Executor*>(static_cast<torch::aot_inductor::ProxyExecutor*>(self))->add(name, overload, given, n);
    return 0;
  });
}

// Makes the first call, on borrowed tensors that it may not write to. `made` is a new handle of the result.
int32_t precast_operators_call(void* self, const int64_t* ints, size_t n_ints, void* const* tensors, size_t n, void** made) {
  return precast_guarded([&] {
    auto* executor = static_cast<Executor*>(static_cast<torch::aot_inductor::ProxyExecutor*>(self));
    if (executor->writes()) refuse("it writes into what it is given");
    c10::NoGradGuard no_grad;
    auto answer = std::make_unique<at::Tensor>();
    std::vector<int64_t> numbers(ints, ints + n_ints);
    std::vector<AtenTensorHandle> handles;
    for (size_t i = 0; i < n; i++) handles.push_back(static_cast<AtenTensorHandle>(tensors[i]));
    handles.push_back(reinterpret_cast<AtenTensorHandle>(answer.get()));
    executor->call_function(
        0, static_cast<int>(n_ints), numbers.data(), static_cast<int>(handles.size()), handles.data());
    if (!answer->defined()) refuse("it gave no tensor");
    *made = answer.release();
    return 0;
  });
}

void precast_operators_delete(void* self) {
  precast_guarded([&] {
    delete static_cast<torch::aot_inductor::ProxyExecutor*>(self);
    return 0;
  });
}

}  // extern "C"
