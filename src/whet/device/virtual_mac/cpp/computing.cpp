// Kernels that differ from the CPU kernels of the same name: convolution, attention, bincount and 4-bit weights.
#include "virtual_mac.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

namespace virtual_mac {
namespace {

using SymSizes = c10::SymIntArrayRef;

// In Convolution.mm, the result has the memory format of the input, and the sums do not depend on the format.
at::Tensor plain(const at::Tensor& tensor) { return on_cpu(tensor).contiguous(); }
at::Tensor to_mps_like(const at::Tensor& cpu_tensor, const at::Tensor& input) {
  return to_mps(cpu_tensor.defined() ? cpu_tensor.contiguous(input.suggest_memory_format()) : cpu_tensor);
}

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
  at::Tensor y = to_mps_like(at::convolution_symint(plain(x), plain(weight), add, stride, padding, dilation, transposed,
                                                    output_padding, std::move(groups)), x);
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
      plain(grad), plain(x), plain(weight), SymSizes(bias_size), stride, padding, dilation, transposed,
      output_padding, std::move(groups), wanted);
  const std::vector<at::Tensor> grads{to_mps_like(dx, x), to_mps_like(dweight, weight), to_mps(dbias)};
  call.done(grads);
  return {grads[0], grads[1], grads[2]};
}

// Uses the math backend, which stores the whole attention matrix, as MPS does for training.
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

// MPS sums weights in float32. The CPU uses float64.
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

// CPU and MPS have different kernels for 4-bit weights. The order of the packed bytes differs from that on a Mac, but
// only int4_product reads them.
at::Tensor pack_int4(const at::Tensor& weight, int64_t tiles) {
  const int64_t n = weight.size(0), k = weight.size(1) * 2;
  return weight.contiguous().view(at::kInt).view({n / 8, k / (tiles * 16), 32, tiles / 2});
}

at::Tensor int4_product(const at::Tensor& x, const at::Tensor& packed, int64_t group, const at::Tensor& scales) {
  const std::vector<at::Tensor> inputs{x, packed, scales};
  const KernelCall call("_weight_int4pack_mm", inputs);
  const int64_t n = packed.size(0) * 8, k = x.size(1);
  const at::Tensor bytes = cpu_alias(packed).contiguous().view(at::kByte).view({n, k / 2});
  const at::Tensor weight = at::stack({bytes.bitwise_right_shift(4), bytes.bitwise_and(15)}, -1).view({n, k / group, group});
  // The scales (k / group, n, 2) hold the scale of each group along k, and the value that the integer 8 stands for.
  const at::Tensor by_group = cpu_alias(scales).to(at::kFloat).transpose(0, 1);
  const at::Tensor wide = (weight.to(at::kFloat) - 8) * by_group.select(2, 0).unsqueeze(2) + by_group.select(2, 1).unsqueeze(2);
  at::Tensor y = to_mps(at::mm(cpu_alias(x).to(at::kFloat), wide.view({n, k}).t()).to(x.scalar_type()));
  call.done({y});
  return y;
}

// Nothing to record: kernels run synchronously, so memory is never reused before its last use.
void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("record_stream", &record_stream);
  m.impl("_convert_weight_to_int4pack", &pack_int4);
  m.impl("_weight_int4pack_mm", &int4_product);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("scaled_dot_product_attention", &attention);
  m.impl("bincount", &bincount);
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", &attention); }

}  // namespace virtual_mac
