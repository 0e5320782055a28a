// Eager: a captured graph as a list of operator calls, made one after the other through the dispatcher.
//
// calls.rs gives the calls once, with their fixed arguments; a run fills in the results of earlier calls. Values are
// numbered: the graph's inputs first, then the results of calls. The last reader of a value takes it, so that its
// memory is free when that call returns. A graph never changes once it is finished: many threads may run it.
//
// There are calls of operators, of functions on numbers for sizes (numbers.h), and of `cond`, whose branches are graphs
// of their own.

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "eager.h"
#include "numbers.h"

int32_t precast_guarded(const std::function<int32_t()>& f) noexcept;

namespace {

using namespace precast;

using Values = std::vector<IValue>;

// A value that a call reads; `last` is set where nothing reads it later.
struct Read {
  size_t number;
  bool last = false;

  IValue from(Values& values) const { return last ? std::move(values[number]) : values[number]; }
};

// An item of a list: a value, or a fixed one.
struct Item {
  std::optional<Read> read;
  IValue fixed;
};

// An argument that a run fills in: one value, or a list of which some items are.
struct Slot {
  size_t at;
  TypePtr type;
  bool list;
  std::vector<Item> items;
};

at::Tensor as_tensor(const c10::Scalar& number) {
  at::Tensor made = c10::scalar_to_tensor(number);
  // It takes part in type promotion as a Python number does.
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A value as an argument of a type takes it: a number may stand for a tensor, an integer for a float.
IValue converted(const TypePtr& type, IValue value) {
  switch (type->kind()) {
    case TypeKind::TensorType:
      return value.isScalar() ? IValue(as_tensor(value.toScalar())) : value;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      return value.isInt() ? IValue(static_cast<double>(value.toInt())) : value;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return value.isBool() ? IValue(static_cast<int64_t>(value.toBool())) : value;
    default: return value;
  }
}

class Graph;

struct Call {
  // The callee: an operator, a function on numbers, or one of two graphs.
  std::optional<c10::OperatorHandle> handle;
  Number number = nullptr;
  std::unique_ptr<Graph> branches[2];
  std::string name;
  Values stack;
  std::vector<Slot> slots;
  // For each result the value it becomes, -1 for none; -2 - n for a list of n, whose values follow.
  std::vector<int64_t> results;
};

class Graph {
 public:
  Graph(c10::Device device, size_t inputs) : device_(device), inputs_(inputs), values_(inputs) {}

  void add(const char* name, const char* overload, const PrecastGiven* given, size_t n) {
    Call call;
    call.name = *overload ? std::string(name) + "." + overload : name;
    if (const std::string text(name); text.rfind("number::", 0) == 0) {
      call.number = number_function(text.substr(8));
      if (!call.number) refuse("this version has no such function");
      for (size_t i = 0; i < n; i++) argument(call, c10::NumberType::get(), given[i]);
    } else {
      call.handle = c10::Dispatcher::singleton().findSchema({name, overload});
      if (!call.handle) refuse("no loaded library registers it");
      by_schema(call, given, n);
    }
    calls_.push_back(std::move(call));
  }

  // A choice between two graphs, by the first argument; the others are their inputs.
  void add_cond(std::unique_ptr<Graph> yes, std::unique_ptr<Graph> no, const PrecastGiven* given, size_t n) {
    Call call;
    call.name = "cond";
    for (size_t i = 0; i < n; i++) argument(call, c10::AnyType::get(), given[i]);
    for (const Graph* graph : {yes.get(), no.get()})
      if (n == 0 || graph->inputs_ != n - 1) refuse("a branch of `cond` takes another number of values");
    call.branches[0] = std::move(no), call.branches[1] = std::move(yes);
    calls_.push_back(std::move(call));
  }

  void results(const int64_t* numbers, size_t n) {
    Call& call = calls_.back();
    for (size_t i = 0; i < n; i++)
      if (numbers[i] >= 0 && static_cast<size_t>(numbers[i]) != values_++) refuse("its results are not numbered in order");
    call.results.assign(numbers, numbers + n);
  }

  // Sets the results, and finds the last reader of each value. Nothing is added later.
  void finish(const int64_t* numbers, size_t n) {
    for (size_t i = 0; i < n; i++) {
      known(numbers[i]);
      outputs_.push_back(static_cast<size_t>(numbers[i]));
    }
    std::vector<bool> later(values_, false);
    for (const size_t output : outputs_) later[output] = true;
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call)
      for (auto slot = call->slots.rbegin(); slot != call->slots.rend(); ++slot)
        for (auto item = slot->items.rbegin(); item != slot->items.rend(); ++item)
          if (item->read) item->read->last = !later[item->read->number], later[item->read->number] = true;
  }

  size_t inputs() const { return inputs_; }
  size_t outputs() const { return outputs_.size(); }

  // Takes `given`, which are as many as `inputs` says.
  Values run(Values given) const {
    Values values = std::move(given);
    values.resize(values_);
    Values stack;
    size_t next = inputs_;
    for (const Call& call : calls_) {
      stack.assign(call.stack.begin(), call.stack.end());
      for (const Slot& slot : call.slots) stack[slot.at] = filled(slot, values);
      try {
        make(call, stack);
        keep(call, stack, values, next);
      } catch (const c10::Error& error) {
        refuse("`" + call.name + "`: " + error.what_without_backtrace());
      } catch (const std::exception& error) {
        refuse("`" + call.name + "`: " + error.what());
      }
      stack.clear();
    }
    Values made;
    made.reserve(outputs_.size());
    for (const size_t output : outputs_) made.push_back(values[output]);
    return made;
  }

 private:
  void by_schema(Call& call, const PrecastGiven* given, size_t n) {
    size_t used = 0;
    for (const c10::Argument& wanted : call.handle->schema().arguments()) {
      const PrecastGiven* found = nullptr;
      for (size_t i = 0; i < n; i++)
        if (wanted.name() == given[i].name) found = &given[i];
      try {
        if (found) {
          used++;
          argument(call, wanted.real_type(), *found);
        } else if (wanted.default_value()) {
          call.stack.push_back(*wanted.default_value());
        } else {
          refuse("it has no value");
        }
      } catch (const std::exception& error) {
        refuse("argument `" + wanted.name() + "`: " + error.what());
      }
    }
    if (used != n) refuse("it was captured with arguments that its schema does not have");
  }

  size_t known(int64_t number) const {
    if (number < 0 || static_cast<size_t>(number) >= values_)
      refuse("value " + std::to_string(number) + " is not made before it is read");
    return static_cast<size_t>(number);
  }

  void argument(Call& call, const TypePtr& declared, const PrecastGiven& given) {
    const TypePtr type = plain(declared);
    Slot slot{call.stack.size(), type, given.is_list != 0, {}};
    call.stack.emplace_back();
    TypePtr of = type;
    if (slot.list) {
      of = element(type);
      if (!of && type->kind() != TypeKind::AnyType) refuse("a list, where the schema has `" + declared->str() + "`");
      slot.type = of ? of : type;
    } else if (given.n != 1) {
      refuse("one value is wanted");
    }
    bool reads = false;
    for (size_t i = 0; i < given.n; i++) {
      const Fixed& one = given.items[i];
      if (one.kind == VALUE) {
        slot.items.push_back({Read{known(one.integer)}, {}});
        reads = true;
      } else {
        slot.items.push_back({std::nullopt, constant(slot.type, one)});
      }
    }
    if (reads) return call.slots.push_back(std::move(slot));
    Values none;
    call.stack.back() = filled(slot, none);
  }

  IValue constant(const TypePtr& declared, const Fixed& one) const {
    if (one.kind == NONE) return {};
    const TypePtr type = plain(declared);
    // A number where a tensor is wanted, as in `x + 1`.
    if (type->kind() == TypeKind::TensorType)
      return as_tensor(fixed(c10::NumberType::get(), one, device_).toScalar());
    if (type->kind() == TypeKind::AnyType) return fixed(c10::NumberType::get(), one, device_);
    if (integral(type) && one.kind == BOOL) return one.integer;
    return fixed(type, one, device_);
  }

  static IValue filled(const Slot& slot, Values& values) {
    const TypePtr type = plain(slot.type);
    const bool optional = type != slot.type;
    auto value = [&](const Item& item) {
      return item.read ? converted(type, item.read->from(values)) : item.fixed;
    };
    if (!slot.list) return value(slot.items[0]);
    switch (type->kind()) {
      case TypeKind::TensorType: {
        if (!optional) return list<at::Tensor>(slot, value, [](IValue one) { return std::move(one).toTensor(); });
        return list<std::optional<at::Tensor>>(slot, value, [](IValue one) {
          return one.isNone() ? std::optional<at::Tensor>() : std::optional<at::Tensor>(std::move(one).toTensor());
        });
      }
      case TypeKind::IntType:
      case TypeKind::SymIntType: return list<int64_t>(slot, value, [](const IValue& one) { return one.toInt(); });
      case TypeKind::FloatType:
      case TypeKind::SymFloatType: return list<double>(slot, value, [](const IValue& one) { return one.toDouble(); });
      case TypeKind::BoolType:
      case TypeKind::SymBoolType: return list<bool>(slot, value, [](const IValue& one) { return one.toBool(); });
      case TypeKind::StringType:
        return list<std::string>(slot, value, [](const IValue& one) { return one.toStringRef(); });
      case TypeKind::NumberType: {
        c10::impl::GenericList made(c10::NumberType::get());
        for (const Item& item : slot.items) made.push_back(value(item));
        return made;
      }
      default: refuse("a call can't be given a list of `" + type->str() + "`");
    }
  }

  template <class T, class F, class C>
  static IValue list(const Slot& slot, const F& value, const C& convert) {
    c10::List<T> made;
    made.reserve(slot.items.size());
    for (const Item& item : slot.items) made.push_back(convert(value(item)));
    return made;
  }

  static void make(const Call& call, Values& stack) {
    if (call.handle) return call.handle->callBoxed(stack);
    if (call.number) {
      IValue made = call.number(stack);
      stack.assign(1, std::move(made));
      return;
    }
    const IValue& chosen = stack.front();
    const bool yes = chosen.isTensor() ? chosen.toTensor().item().toBool() : chosen.toScalar().toBool();
    stack.erase(stack.begin());
    stack = call.branches[yes]->run(std::move(stack));
  }

  static void keep(const Call& call, Values& stack, Values& values, size_t& next) {
    size_t at = 0;
    for (size_t i = 0; i < call.results.size(); i++, at++) {
      if (at >= stack.size()) refuse("it gave fewer results than were captured");
      const int64_t number = call.results[i];
      if (number >= 0) values[next++] = std::move(stack[at]);
      if (number >= -1) continue;
      const auto n = static_cast<size_t>(-2 - number);
      const auto list = stack[at].toListRef();
      if (list.size() != n) refuse("it gave a list of " + std::to_string(list.size()) + ", not of " + std::to_string(n));
      for (size_t k = 0; k < n; k++)
        if (call.results[++i] >= 0) values[next++] = list[k];
    }
  }

  c10::Device device_;
  size_t inputs_;
  size_t values_;
  std::vector<Call> calls_;
  std::vector<size_t> outputs_;
};

Graph& graph(void* self) { return *static_cast<Graph*>(self); }

}  // namespace

extern "C" {

int32_t precast_calls_new(const char* device, size_t inputs, void** made) {
  return precast_guarded([&] {
    *made = new Graph(c10::Device(device), inputs);
    return 0;
  });
}

// Adds a call of an operator, or of a function on numbers as `number::add`.
int32_t precast_calls_add(
    void* self, const char* name, const char* overload, const PrecastGiven* given, size_t n, const int64_t* results,
    size_t n_results) {
  return precast_guarded([&] {
    graph(self).add(name, overload, given, n);
    graph(self).results(results, n_results);
    return 0;
  });
}

// Adds a choice between two finished graphs, which it takes, also where it fails.
int32_t precast_calls_add_cond(
    void* self, void* yes, void* no, const PrecastGiven* given, size_t n, const int64_t* results, size_t n_results) {
  return precast_guarded([&] {
    std::unique_ptr<Graph> first(static_cast<Graph*>(yes)), second(static_cast<Graph*>(no));
    graph(self).add_cond(std::move(first), std::move(second), given, n);
    graph(self).results(results, n_results);
    return 0;
  });
}

int32_t precast_calls_finish(void* self, const int64_t* outputs, size_t n) {
  return precast_guarded([&] {
    graph(self).finish(outputs, n);
    return 0;
  });
}

// Runs a finished graph. Inputs are borrowed; outputs are new handles, the caller's.
int32_t precast_calls_run(void* self, void* const* inputs, size_t n_in, void** outputs, size_t n_out) {
  return precast_guarded([&] {
    const Graph& calls = graph(self);
    if (calls.inputs() != n_in || calls.outputs() != n_out)
      refuse("the graph has " + std::to_string(calls.inputs()) + " inputs and " + std::to_string(calls.outputs()) +
             " outputs, the call " + std::to_string(n_in) + " and " + std::to_string(n_out));
    c10::NoGradGuard no_grad;
    // Straight to the kernels: nothing is recorded for gradients.
    at::AutoDispatchBelowADInplaceOrView below;
    Values given;
    given.reserve(n_in);
    for (size_t i = 0; i < n_in; i++) given.emplace_back(*static_cast<const at::Tensor*>(inputs[i]));
    const Values made = calls.run(std::move(given));
    for (const IValue& one : made)
      if (!one.isTensor()) refuse("an output of the graph is no tensor");
    for (size_t i = 0; i < n_out; i++) outputs[i] = new at::Tensor(made[i].toTensor());
    return 0;
  });
}

void precast_calls_delete(void* self) {
  precast_guarded([&] {
    delete static_cast<Graph*>(self);
    return 0;
  });
}

}  // extern "C"
