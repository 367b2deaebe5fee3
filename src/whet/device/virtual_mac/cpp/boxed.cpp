// Every other operator: computed by the CPU's kernel over the same bytes if MPS has a kernel for it, else refused or
// sent to the CPU as MPS does. One function for all of them, through the dispatcher's boxed calls.
#include "virtual_mac.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace virtual_mac {
namespace {

using torch::jit::Stack;

std::string name_of(const c10::OperatorHandle& op) {
  const auto& full = op.operator_name();
  const std::string name = full.name.substr(full.name.rfind(':') + 1);
  return full.overload_name.empty() ? name : name + "." + full.overload_name;
}

// Operators that take CPU tensors next to mps ones; the others take only numbers in a tensor of no dimensions.
bool takes_cpu_tensors(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::index",        "aten::index_put",           "aten::index_put_",           "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::repeat_interleave",  "aten::_ctc_loss",            "aten::_ctc_loss_backward",
      "aten::_fused_adam_", "aten::_fused_adamw_",       "aten::_fused_sgd_",          "aten::_pack_padded_sequence",
      "aten::_pad_packed_sequence"};
  return names.count(op.operator_name().name) > 0;
}

// Which CPU tensor stands for which mps tensor during one call.
class Stand {
 public:
  explicit Stand(bool takes_cpu_tensors) : takes_cpu_tensors_(takes_cpu_tensors) {}

  at::Tensor in(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.device().is_mps()) {
      TORCH_CHECK(takes_cpu_tensors_ || tensor.dim() == 0 || !tensor.device().is_cpu(),
                  "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!");
      return tensor;
    }
    // An empty tensor that is to be written must be able to grow, which an alias is not.
    const bool may_grow = is_written && tensor.numel() == 0;
    auto alias = may_grow ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : cpu_alias(tensor);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }

  void copy_back_what_grew() const {
    for (const auto& [tensor, alias] : pairs_) {
      if (tensor.numel() > 0 || alias.sizes() == tensor.sizes()) continue;
      tensor.resize_(alias.sizes());
      if (!alias.is_contiguous())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      cpu_alias(tensor).copy_(alias);
    }
  }

  at::Tensor out(const at::Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& [tensor, alias] : pairs_)
      if (alias.is_same(result)) return tensor;
    return to_mps(result);
  }

 private:
  bool takes_cpu_tensors_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

bool is_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// For operators that draw but take no generator: the CPU's own one is lent the device's next draw and put back.
class LentDraw {
 public:
  explicit LentDraw(bool draws) : draws_(draws) {
    if (!draws_) return;
    saved_ = cpu_.get_state();
    cpu_.set_state(next_draw(std::nullopt).get_state());
  }
  ~LentDraw() {
    if (draws_) cpu_.set_state(saved_);
  }

 private:
  bool draws_;
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Tensor saved_;
};

c10::IValue argument_on_cpu(const c10::IValue& value, const c10::Argument& argument, Stand& stand) {
  const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
  if (is_generator(argument)) {
    if (value.isNone()) return next_draw(std::nullopt);
    return value.toGenerator().device().is_mps() ? c10::IValue(next_draw(value.toGenerator())) : value;
  }
  if (value.isTensor()) return stand.in(value.toTensor(), is_written);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(stand.in(tensor, is_written));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(stand.in(*tensor, is_written)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_mps()) return c10::Device(c10::kCPU);
  return value;
}

c10::IValue result_on_mps(const c10::IValue& value, const Stand& stand) {
  if (value.isTensor()) return stand.out(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(stand.out(tensor));
  return list;
}

void count_fallback(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  ++counters().fallbacks[name_of(op)];
}

void warn_of_fallback(const c10::OperatorHandle& op) {
  TORCH_WARN_ONCE("The operator '", op.schema().operator_name(),
                  "' is not currently supported on the MPS backend and will fall back to run on the CPU. "
                  "This may have performance implications.");
}

// The backend's last resort: an operator without a kernel. Text: MPSFallback.mm of torch 2.13.
void without_kernel(const c10::OperatorHandle& op, Stack* stack) {
  if (settings().native_operators.count(name_of(op)) > 0) return compute_on_cpu(op, stack);
  TORCH_CHECK_NOT_IMPLEMENTED(
      settings().has_fallback, "The operator '", op.schema().operator_name(),
      "' is not currently implemented for the MPS device. If you want this op to be considered for addition please "
      "comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that resulted in missing op "
      "as well as commit hash ", settings().torch_commit,
      ". As a temporary fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a "
      "fallback for this op. WARNING: this will be slower than running natively on MPS.");
  always_on_cpu(op, stack);
}

// AdaptivePooling.mm: sizes that do not divide have no kernel.
void adaptive_pool(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor x = (*stack)[first].toTensor();
  const auto wanted = (*stack)[first + 1].toIntVector();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const int64_t has = x.size(static_cast<int64_t>(i) - static_cast<int64_t>(wanted.size()));
    TORCH_CHECK(std::min(has, wanted[i]) == 0 || std::max(has, wanted[i]) % std::min(has, wanted[i]) == 0,
                "Adaptive pool MPS: input sizes must be divisible by output sizes. Non-divisible input sizes are not "
                "implemented on MPS device yet. For now, you can manually transfer tensor to cpu in this case. Please "
                "refer to [this issue](https://github.com/pytorch/pytorch/issues/96056)");
  }
  compute_on_cpu(op, stack);
}

}  // namespace

void compute_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  Stand stand(takes_cpu_tensors(op));
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    has_generator = has_generator || is_generator(arguments[i]);
    (*stack)[first + i] = argument_on_cpu((*stack)[first + i], arguments[i], stand);
  }
  {
    LentDraw lent(!has_generator && op.hasTag(at::Tag::nondeterministic_seeded));
    op.callBoxed(stack);
  }
  stand.copy_back_what_grew();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = result_on_mps((*stack)[i], stand);
}

void always_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  count_fallback(op);
  warn_of_fallback(op);
  ++counters().num_syncs;
  at::native::cpu_fallback(op, stack);
}

void register_native_kernels(const std::vector<std::string>& operators) {
  // Kernels stay registered as long as the process lives.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  static const std::unordered_set<std::string> pools{"_adaptive_avg_pool2d", "adaptive_avg_pool2d.out"};
  for (const std::string& name : operators)
    library->impl(name.c_str(), pools.count(name)
                                    ? torch::CppFunction::makeFromBoxedFunction<&adaptive_pool>()
                                    : torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&without_kernel>()); }

// MPSFallback.mm of torch 2.13: on the CPU with or without PYTORCH_ENABLE_MPS_FALLBACK.
TORCH_LIBRARY_IMPL(aten, MPS, m) {
  for (const char* name : {"embedding_renorm_", "linalg_svd", "linalg_svd.U"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&always_on_cpu>());
}

}  // namespace virtual_mac
