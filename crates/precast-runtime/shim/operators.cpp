// What an artifact calls for operators that have no C entry point of their own: custom ones, and a few of torch's.
//
// libtorch's executor of these calls (OSSProxyExecutor) is not exported and reads a file. This one has the same rules:
// a call's numbers and tensors come at run time, in the schema's order; everything else is fixed when it is made.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_torch/proxy_executor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "operators.h"

int32_t precast_guarded(const std::function<int32_t()>& f) noexcept;

namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

enum Kind { NONE, TENSOR, TENSORS, OPTIONAL_TENSORS, INT, INTS, FLOAT, FLOATS, BOOL, BOOLS, STRING, SCALAR_TYPE, LAYOUT, MEMORY_FORMAT, DEVICE };

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

// torch's export schema numbers these its own way (torch/_export/serde/schema.py).
c10::ScalarType scalar_type(int64_t number) {
  using T = c10::ScalarType;
  switch (number) {
    case 1: return T::Byte;
    case 2: return T::Char;
    case 3: return T::Short;
    case 4: return T::Int;
    case 5: return T::Long;
    case 6: return T::Half;
    case 7: return T::Float;
    case 8: return T::Double;
    case 9: return T::ComplexHalf;
    case 10: return T::ComplexFloat;
    case 11: return T::ComplexDouble;
    case 12: return T::Bool;
    case 13: return T::BFloat16;
    case 28: return T::UInt16;
    case 29: return T::Float8_e4m3fn;
    case 30: return T::Float8_e5m2;
    case 31: return T::Float8_e4m3fnuz;
    case 32: return T::Float8_e5m2fnuz;
    default: refuse("scalar type " + std::to_string(number) + " is not known");
  }
}

c10::Layout layout(int64_t number) {
  using L = c10::Layout;
  switch (number) {
    case 1: return L::Sparse;
    case 2: return L::SparseCsr;
    case 3: return L::SparseCsc;
    case 4: return L::SparseBsr;
    case 5: return L::SparseBsc;
    case 6: return L::Mkldnn;
    case 7: return L::Strided;
    default: refuse("layout " + std::to_string(number) + " is not known");
  }
}

c10::MemoryFormat memory_format(int64_t number) {
  using M = c10::MemoryFormat;
  switch (number) {
    case 1: return M::Contiguous;
    case 2: return M::ChannelsLast;
    case 3: return M::ChannelsLast3d;
    case 4: return M::Preserve;
    default: refuse("memory format " + std::to_string(number) + " is not known");
  }
}

// An argument that comes with the call.
struct Slot {
  enum What { OneTensor, Tensors, OptionalTensors, OneInt, Ints } what;
  size_t at;
  // For tensors that may be missing: which are there.
  std::vector<bool> given;
  size_t count = 1;
};

struct Operator {
  c10::OperatorHandle handle;
  std::vector<IValue> stack;
  std::vector<Slot> slots;

  explicit Operator(c10::OperatorHandle handle) : handle(std::move(handle)) {}

  void dynamic(Slot::What what, size_t count, std::vector<bool> given = {}) {
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
      if (next_int >= n_ints) refuse(told(op) + " got too few numbers");
      return ints[next_int++];
    };
    auto tensor = [&]() -> at::Tensor& {
      if (next_tensor >= n_tensors) refuse(told(op) + " got too few tensors");
      return *reinterpret_cast<at::Tensor*>(handles[next_tensor++]);
    };
    for (const Slot& slot : op.slots) {
      switch (slot.what) {
        case Slot::OneTensor: stack[slot.at] = tensor(); break;
        case Slot::OneInt: stack[slot.at] = integer(); break;
        case Slot::Tensors: {
          c10::List<at::Tensor> list;
          for (size_t i = 0; i < slot.count; i++) list.push_back(tensor());
          stack[slot.at] = std::move(list);
          break;
        }
        case Slot::OptionalTensors: {
          c10::List<std::optional<at::Tensor>> list;
          for (bool there : slot.given) list.push_back(there ? std::optional<at::Tensor>(tensor()) : std::nullopt);
          stack[slot.at] = std::move(list);
          break;
        }
        case Slot::Ints: {
          c10::List<int64_t> list;
          for (size_t i = 0; i < slot.count; i++) list.push_back(integer());
          stack[slot.at] = std::move(list);
          break;
        }
      }
    }
    op.handle.callBoxed(stack);
    // What it returns goes into the handles that are left, in order; those that are missing or no tensors have none.
    for (const IValue& answer : stack) {
      if (answer.isTensor()) {
        // One that was only changed in place may have no handle.
        if (next_tensor < n_tensors) tensor() = answer.toTensor();
      } else if (answer.isTensorList()) {
        for (const at::Tensor& one : answer.toTensorVector()) tensor() = one;
      } else if (!answer.isNone() && !answer.isInt()) {
        refuse(told(op) + " returned what an artifact can't take");
      }
    }
    if (next_tensor != n_tensors) refuse(told(op) + " took " + std::to_string(next_tensor) + " tensors of " + std::to_string(n_tensors));
  }

 private:
  static std::string told(const Operator& op) { return "operator `" + toString(op.handle.operator_name()) + "`"; }

  static TypePtr plain(const TypePtr& type) {
    const auto* optional = type->castRaw<c10::OptionalType>();
    return optional ? optional->getElementType() : type;
  }

  static TypePtr element(const TypePtr& type) {
    const auto* list = type->castRaw<c10::ListType>();
    return list ? list->getElementType() : nullptr;
  }

  static bool integral(const TypePtr& type) {
    return type && (type->kind() == TypeKind::IntType || type->kind() == TypeKind::SymIntType);
  }

  void argument(Operator& op, const TypePtr& declared, const PrecastArgument& given) {
    if (given.kind == NONE) return op.stack.emplace_back(), void();
    const TypePtr type = plain(declared);
    const TypePtr of = element(type);
    auto need = [&](bool right) {
      if (!right) refuse("it was compiled with another type than `" + declared->str() + "`");
    };
    if (of) return list(op, of, given, need);
    switch (type->kind()) {
      case TypeKind::TensorType: need(given.kind == TENSOR); return op.dynamic(Slot::OneTensor, 1);
      case TypeKind::IntType:
      case TypeKind::SymIntType: need(given.kind == INT); return op.dynamic(Slot::OneInt, 1);
      case TypeKind::NumberType:
        if (given.kind == INT) return op.dynamic(Slot::OneInt, 1);
        need(given.kind == FLOAT || given.kind == BOOL);
        if (given.kind == FLOAT) op.stack.emplace_back(given.floats[0]);
        else op.stack.emplace_back(given.ints[0] != 0);
        return;
      case TypeKind::FloatType:
      case TypeKind::SymFloatType:
        need(given.kind == FLOAT || given.kind == INT);
        op.stack.emplace_back(given.kind == FLOAT ? given.floats[0] : static_cast<double>(given.ints[0]));
        return;
      case TypeKind::BoolType:
      case TypeKind::SymBoolType: need(given.kind == BOOL); op.stack.emplace_back(given.ints[0] != 0); return;
      case TypeKind::StringType: need(given.kind == STRING); op.stack.emplace_back(std::string(given.text)); return;
      case TypeKind::ScalarTypeType: need(given.kind == SCALAR_TYPE); op.stack.emplace_back(scalar_type(given.ints[0])); return;
      case TypeKind::LayoutType: need(given.kind == LAYOUT); op.stack.emplace_back(layout(given.ints[0])); return;
      case TypeKind::MemoryFormatType:
        need(given.kind == MEMORY_FORMAT);
        op.stack.emplace_back(memory_format(given.ints[0]));
        return;
      case TypeKind::DeviceObjType: {
        need(given.kind == DEVICE);
        const c10::Device device(given.text);
        // The device it was compiled on is, here, the one it runs on.
        op.stack.emplace_back(device.type() == device_.type() ? device_ : device);
        return;
      }
      default: refuse("an artifact can't pass a `" + declared->str() + "`");
    }
  }

  template <class Need>
  static void list(Operator& op, const TypePtr& of, const PrecastArgument& given, Need need) {
    // An empty list has no type of its own.
    const bool empty = given.n_ints == 0 && given.n_floats == 0 && given.kind != TENSORS;
    if (of->kind() == TypeKind::TensorType) {
      need(given.kind == TENSORS || empty);
      return op.dynamic(Slot::Tensors, given.kind == TENSORS ? static_cast<size_t>(given.ints[0]) : 0);
    }
    if (of->kind() == TypeKind::OptionalType) {
      need(plain(of)->kind() == TypeKind::TensorType);
      std::vector<bool> there;
      if (given.kind == TENSORS) there.assign(static_cast<size_t>(given.ints[0]), true);
      else need(given.kind == OPTIONAL_TENSORS || empty);
      if (given.kind == OPTIONAL_TENSORS)
        for (size_t i = 0; i < given.n_ints; i++) there.push_back(given.ints[i] != 0);
      return op.dynamic(Slot::OptionalTensors, 0, std::move(there));
    }
    if (integral(of) || (of->kind() == TypeKind::NumberType && given.kind == INTS)) {
      need(given.kind == INTS || empty);
      return op.dynamic(Slot::Ints, given.kind == INTS ? given.n_ints : 0);
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
    if (value.isInt() && (integral(type) || type->kind() == TypeKind::NumberType)) return op.dynamic(Slot::OneInt, 1);
    if (value.isIntList() && integral(element(type))) return op.dynamic(Slot::Ints, value.toIntVector().size());
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

// Makes the first call that was added, on borrowed tensors that it may not write to; `made` is a new handle of what it gives.
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
