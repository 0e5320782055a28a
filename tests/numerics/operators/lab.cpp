// Operators with all kinds of arguments of a schema: fixed and counted numbers, lists, optional values, several
// results.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

namespace {

at::Tensor scale(const at::Tensor& x, double k, bool negate) { return negate ? x * -k : x * k; }

at::Tensor mix(at::TensorList xs, const std::optional<at::Tensor>& bias, c10::string_view mode, std::optional<at::ScalarType> dtype) {
  at::Tensor sum = at::zeros_like(xs[0]);
  for (size_t i = 0; i < xs.size(); i++) sum = mode == "mean" ? sum + xs[i] / double(xs.size()) : sum + xs[i];
  if (bias) sum = sum + *bias;
  return dtype ? sum.to(*dtype) : sum;
}

std::tuple<at::Tensor, std::vector<at::Tensor>> parts(const at::Tensor& x, at::IntArrayRef sizes, int64_t dim, at::ArrayRef<double> factors) {
  std::vector<at::Tensor> pieces = x.split_with_sizes(sizes, dim);
  for (size_t i = 0; i < pieces.size(); i++) pieces[i] = pieces[i] * factors[i];
  return {x.sum(dim), pieces};
}

void add_in_place(at::Tensor& x, const at::Scalar& k) { x.add_(k); }

}  // namespace

TORCH_LIBRARY(lab, m) {
  m.def("scale(Tensor x, float k, *, bool negate=False) -> Tensor");
  m.def("mix(Tensor[] xs, Tensor? bias=None, str mode=\"sum\", *, ScalarType? dtype=None) -> Tensor");
  m.def("parts(Tensor x, int[] sizes, int dim, float[] factors) -> (Tensor, Tensor[])");
  m.def("add_in_place(Tensor(a!) x, Scalar k) -> ()");
}

TORCH_LIBRARY_IMPL(lab, CompositeExplicitAutograd, m) {
  m.impl("scale", &scale);
  m.impl("mix", &mix);
  m.impl("parts", &parts);
  m.impl("add_in_place", &add_in_place);
}
