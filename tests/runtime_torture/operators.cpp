// The calls of operators by artifacts (operators.cpp of the shim), for the sanitizers: every kind of argument that a
// schema can have, descriptions that do not fit it, and calls that fail or get too few or too many tensors.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_torch/proxy_executor.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "handles.h"
#include "must.h"
#include "operators.h"

using Ptr = void*;

extern "C" {
const char* precast_last_error();
int32_t precast_operator_names(void (*each)(Ptr, const char*), Ptr context);
int32_t precast_operators_new(const char* device, Ptr* made);
int32_t precast_operators_add(Ptr, const char* name, const char* overload, const PrecastArgument*, size_t);
int32_t precast_operators_call(Ptr, const int64_t* ints, size_t n_ints, Ptr const* tensors, size_t n, Ptr* made);
void precast_operators_delete(Ptr);
}

namespace {

using Stack = torch::jit::Stack;

// As in `Value` of operators.rs.
enum Kind { NONE, TENSOR, TENSORS, OPTIONAL_TENSORS, INT, INTS, FLOAT, FLOATS, BOOL, BOOLS, STRING, SCALAR_TYPE, LAYOUT, MEMORY_FORMAT, DEVICE };

// Gives one number that all arguments are part of.
void all(const c10::OperatorHandle&, Stack* stack) {
  auto in = torch::jit::pop(*stack, 18);
  double sum = in[0].toTensor().sum().item<double>();
  for (const at::Tensor& one : in[1].toTensorVector()) sum += one.sum().item<double>();
  for (const auto& one : in[2].toOptionalTensorVector()) sum += one ? one->sum().item<double>() : 1000;
  sum += static_cast<double>(in[3].toInt());
  for (int64_t one : in[4].toIntVector()) sum += static_cast<double>(one);
  sum += in[5].toDouble();
  for (double one : in[6].toDoubleVector()) sum += one;
  sum += in[7].toBool() ? 1 : 0;
  for (bool one : in[8].toBoolList()) sum += one ? 1 : 0;
  sum += static_cast<double>(in[9].toStringRef().size());
  MUST(in[10].toScalarType() == at::kDouble && in[11].toLayout() == at::kStrided);
  MUST(in[12].toMemoryFormat() == at::MemoryFormat::ChannelsLast && in[13].toDevice() == at::kCPU);
  sum += in[14].toScalar().toDouble();
  MUST(in[15].isNone());
  sum += static_cast<double>(in[16].toInt());
  for (int64_t one : in[17].toIntVector()) sum += static_cast<double>(one);
  torch::jit::push(*stack, at::full({1}, sum));
}

at::Tensor throws(const at::Tensor&) { throw std::runtime_error("the operator refuses"); }
std::tuple<at::Tensor, std::vector<at::Tensor>> two(const at::Tensor& x) { return {x + 1, {x + 2, x + 3}}; }
void write(at::Tensor x) { x.add_(1); }
std::string text(const at::Tensor&) { return "no tensor"; }
std::optional<at::Tensor> maybe(const at::Tensor&, bool there) {
  return there ? std::optional<at::Tensor>(at::ones({1})) : std::nullopt;
}

TORCH_LIBRARY(precast_driver, m) {
  m.def(
      "all(Tensor x, Tensor[] many, Tensor?[] some, int i, int[] list, float f, float[] fs, bool b, bool[] bs, str s, "
      "ScalarType t, Layout l, MemoryFormat m, Device d, Scalar k, int? none, int late=3, int[2] lates=[4, 5]) -> Tensor",
      torch::CppFunction::makeFromBoxedFunction<&all>());
  m.def("throws(Tensor x) -> Tensor", throws);
  m.def("two(Tensor x) -> (Tensor, Tensor[])", two);
  m.def("write(Tensor(a!) x) -> ()", write);
  m.def("text(Tensor x) -> str", text);
  m.def("maybe(Tensor x, bool there) -> Tensor?", maybe);
}

// The arguments, with the memory that they point to.
struct Given {
  const char* name;
  Kind kind;
  std::vector<int64_t> ints = {};
  std::vector<double> floats = {};
  std::string text = {};
};

std::vector<PrecastArgument> pointers(const std::vector<Given>& given) {
  std::vector<PrecastArgument> raw;
  for (const Given& one : given)
    raw.push_back({one.name, one.kind, one.ints.data(), one.ints.size(), one.floats.data(), one.floats.size(), one.text.c_str()});
  return raw;
}

int32_t add(Ptr executor, const char* name, const std::vector<Given>& given) {
  const std::vector<PrecastArgument> raw = pointers(given);
  return precast_operators_add(executor, name, "", raw.data(), raw.size());
}

Ptr executor() {
  Ptr made = nullptr;
  MUST(precast_operators_new("cpu", &made) == 0);
  return made;
}

bool last_error_has(const char* words) { return std::string(precast_last_error()).find(words) != std::string::npos; }

// As an artifact calls: it throws, and the shim catches around a run.
std::string call(Ptr executor, int index, std::vector<int64_t> ints, std::vector<at::Tensor*> tensors) {
  try {
    static_cast<torch::aot_inductor::ProxyExecutor*>(executor)->call_function(
        index, static_cast<int>(ints.size()), ints.data(), static_cast<int>(tensors.size()),
        reinterpret_cast<AtenTensorHandle*>(tensors.data()));
  } catch (const std::exception& error) {
    const std::string what = error.what();
    return what.substr(0, what.find('\n'));
  }
  return "";
}

const std::vector<Given>& whole() {
  static const std::vector<Given> given = {
      {"x", TENSOR}, {"many", TENSORS, {2}}, {"some", OPTIONAL_TENSORS, {1, 0, 1}}, {"i", INT}, {"list", INTS, {0, 0, 0}},
      {"f", FLOAT, {}, {0.5}}, {"fs", FLOATS, {}, {0.25, 0.25}}, {"b", BOOL, {1}}, {"bs", BOOLS, {1, 0, 1}},
      {"s", STRING, {}, {}, "four"}, {"t", SCALAR_TYPE, {8}}, {"l", LAYOUT, {7}}, {"m", MEMORY_FORMAT, {2}},
      {"d", DEVICE, {}, {}, "cpu"}, {"k", FLOAT, {}, {8.0}}, {"none", NONE}};
  return given;
}

void right(Ptr shared) {
  at::Tensor one = at::ones({1}), out;
  // x, many, some without the missing one: 5 times 1; 1000 for that; i, list: 1 + 2 + 3 + 4; 0.5 and 0.5; 1; 2; 4
  // letters; 8; and the numbers of arguments with defaults.
  MUST(call(shared, 0, {1, 2, 3, 4, 3, 4, 5}, {&one, &one, &one, &one, &one, &out}).empty());
  MUST(out.item<double>() == 5 + 1000 + 10 + 1 + 1 + 2 + 4 + 8 + 12);
  at::Tensor first, second, third;
  MUST(call(shared, 1, {}, {&one, &first, &second, &third}).empty());
  MUST(first.item<float>() == 2 && second.item<float>() == 3 && third.item<float>() == 4);
  at::Tensor changed = at::ones({1});
  MUST(call(shared, 2, {}, {&changed}).empty() && changed.item<float>() == 2);
  MUST(call(shared, 3, {}, {&one, &out}).empty() && out.item<float>() == 1);
  MUST(call(shared, 4, {}, {&one}).empty());
  // Too few, too many, and without a description.
  MUST(call(shared, 0, {1}, {&one, &one, &one, &one, &one, &out}).find("too few numbers") != std::string::npos);
  MUST(call(shared, 0, {1, 2, 3, 4, 3, 4, 5}, {&one, &one}).find("too few tensors") != std::string::npos);
  MUST(call(shared, 1, {}, {&one, &first, &second}).find("too few tensors") != std::string::npos);
  MUST(call(shared, 1, {}, {&one, &first, &second, &third, &out}).find("took 4 tensors of 5") != std::string::npos);
  MUST(call(shared, 5, {}, {&one, &out}).find("the operator refuses") != std::string::npos);
  MUST(call(shared, 6, {}, {&one, &out}).find("an artifact can't take") != std::string::npos);
  MUST(call(shared, 7, {}, {}).find("without a description") != std::string::npos);
  MUST(call(shared, -1, {}, {}).find("without a description") != std::string::npos);
}

void wrong() {
  Ptr with = executor();
  MUST(add(with, "precast_driver::nobody", {}) != 0 && last_error_has("no loaded library"));
  MUST(add(with, "precast_driver::two", {}) != 0 && last_error_has("it has no value"));
  MUST(add(with, "precast_driver::two", {{"x", TENSOR}, {"y", INT}}) != 0 && last_error_has("does not have"));
  // Each argument as every other kind: kinds that the schema does not take are refused, and nothing outside is read.
  for (size_t at = 0; at < whole().size(); at++)
    for (int kind = NONE; kind <= DEVICE; kind++) {
      auto given = whole();
      given[at].kind = static_cast<Kind>(kind);
      // The memory that each kind may read.
      given[at].ints = {1, 1};
      given[at].floats = {1, 1};
      given[at].text = "cpu";
      if (add(with, "precast_driver::all", given) != 0) MUST(last_error_has("argument `"));
    }
  for (int64_t number : {-1, 0, 999}) {
    auto given = whole();
    for (const size_t at : {size_t{10}, size_t{11}, size_t{12}}) {
      given[at].ints = {number};
      MUST(add(with, "precast_driver::all", given) != 0 && last_error_has("is not known"));
      given[at] = whole()[at];
    }
  }
  auto given = whole();
  given[13].text = "nothing like a device";
  MUST(add(with, "precast_driver::all", given) != 0);
  precast_operators_delete(with);
  Ptr none = nullptr;
  MUST(precast_operators_new("nothing like a device", &none) != 0 && none == nullptr);
}

// The entry that binds weights with.
void prepared() {
  at::Tensor one = at::ones({1});
  const Ptr in[2] = {&one, &one};
  Ptr made = nullptr;
  for (const auto& [name, given, fails] : std::vector<std::tuple<const char*, std::vector<Given>, const char*>>{
           {"precast_driver::write", {{"x", TENSOR}}, "it writes into"},
           {"precast_driver::throws", {{"x", TENSOR}}, "the operator refuses"},
           {"precast_driver::maybe", {{"x", TENSOR}, {"there", BOOL, {0}}}, "took 1 tensors of 2"},
           {"precast_driver::maybe", {{"x", TENSOR}, {"there", BOOL, {1}}}, nullptr}}) {
    Ptr with = executor();
    MUST(add(with, name, given) == 0);
    const int32_t code = precast_operators_call(with, nullptr, 0, in, 1, &made);
    MUST((code != 0) == (fails != nullptr) && (code == 0 || last_error_has(fails)));
    if (code == 0) drop(made);
    made = nullptr;
    MUST(precast_operators_call(with, nullptr, 0, in, 2, &made) != 0 && made == nullptr);
    precast_operators_delete(with);
  }
}

}  // namespace

// A read past the end of a description: the sanitizer's control.
void overread() {
  Ptr with = executor();
  std::vector<PrecastArgument> raw = pointers(whole());
  raw[8].n_ints = 4;
  precast_operators_add(with, "precast_driver::all", "", raw.data(), raw.size());
  precast_operators_delete(with);
}

// Many slots at once: they share an executor.
Ptr shared_executor() {
  Ptr made = executor();
  MUST(add(made, "precast_driver::all", whole()) == 0);
  MUST(add(made, "precast_driver::two", {{"x", TENSOR}}) == 0);
  MUST(add(made, "precast_driver::write", {{"x", TENSOR}}) == 0);
  MUST(add(made, "precast_driver::maybe", {{"x", TENSOR}, {"there", BOOL, {1}}}) == 0);
  MUST(add(made, "precast_driver::maybe", {{"x", TENSOR}, {"there", BOOL, {0}}}) == 0);
  MUST(add(made, "precast_driver::throws", {{"x", TENSOR}}) == 0);
  MUST(add(made, "precast_driver::text", {{"x", TENSOR}}) == 0);
  return made;
}

uint64_t operators(Ptr shared) {
  right(shared);
  wrong();
  prepared();
  size_t known = 0;
  MUST(precast_operator_names(
           [](Ptr count, const char* name) { *static_cast<size_t*>(count) += std::string(name).find("::") != std::string::npos; },
           &known) == 0);
  MUST(known > 1000);
  return 14 + whole().size() * 15 + 20;
}
