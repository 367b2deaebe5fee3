// Kernels that compute otherwise than the CPU's of the same name: convolution, attention, counting.
#include "virtual_mac.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

namespace virtual_mac {
namespace {

using SymSizes = c10::SymIntArrayRef;

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       SymSizes stride, SymSizes padding, SymSizes dilation, bool transposed, SymSizes output_padding,
                       c10::SymInt groups) {
  std::vector<at::Tensor> inputs{x, weight};
  std::optional<at::Tensor> add;
  if (bias && bias->defined()) {
    inputs.push_back(*bias);
    add = on_cpu(*bias);
  }
  const KernelCall call("convolution", inputs);
  at::Tensor y = to_mps(at::convolution_symint(on_cpu(x), on_cpu(weight), add, stride, padding, dilation, transposed,
                                               output_padding, std::move(groups)));
  call.done({y});
  return y;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, SymSizes stride, SymSizes padding,
    SymSizes dilation, bool transposed, SymSizes output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  const std::vector<c10::SymInt> bias_size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const std::vector<at::Tensor> inputs{grad, x, weight};
  const KernelCall call("convolution_backward", inputs);
  auto [dx, dweight, dbias] = at::convolution_backward_symint(
      on_cpu(grad), on_cpu(x), on_cpu(weight), SymSizes(bias_size), stride, padding, dilation, transposed,
      output_padding, std::move(groups), wanted);
  const std::vector<at::Tensor> grads{to_mps(dx), to_mps(dweight), to_mps(dbias)};
  call.done(grads);
  return {grads[0], grads[1], grads[2]};
}

// MPS trains through the plain formula, which keeps the whole attention matrix; so does this.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  std::optional<at::Tensor> added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, query.options())
                .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, added, dropout, is_causal, std::nullopt,
                                                            scale, enable_gqa));
}

// MPS adds weights in float32, where the CPU takes float64.
at::Tensor bincount(const at::Tensor& x, const std::optional<at::Tensor>& weights, int64_t min_length) {
  const bool has_weights = weights && weights->defined();
  std::vector<at::Tensor> inputs{x};
  if (has_weights) inputs.push_back(*weights);
  const KernelCall call("bincount", inputs);
  at::Tensor counted = at::bincount(cpu_alias(x), has_weights ? on_cpu(*weights) : at::Tensor(), min_length);
  at::Tensor y = to_mps(counted.scalar_type() == at::kDouble ? counted.to(at::kFloat) : counted);
  call.done({y});
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("scaled_dot_product_attention", &attention);
  m.impl("bincount", &bincount);
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", &attention); }

}  // namespace virtual_mac
