// Operators that MPS runs on the CPU or rejects, because they have no kernel or the kernel does not support the sizes.
#include "virtual_mac.h"

#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

namespace virtual_mac {
namespace {

using torch::jit::Stack;

void warn_of_fallback(const c10::OperatorHandle& op) {
  TORCH_WARN_ONCE("The operator '", op.schema().operator_name(),
                  "' is not currently supported on the MPS backend and will fall back to run on the CPU. "
                  "This may have performance implications.");
}

void always_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  warn_of_fallback(op);
  ++counters().num_syncs;
  const auto start = Clock::now();
  at::native::cpu_fallback(op, stack);
  std::lock_guard<std::mutex> lock(counters().mutex);
  Fallback& counted = counters().fallbacks[name_of(op)];
  ++counted.calls;
  counted.seconds += seconds_since(start);
}

// The backend fallback, for operators without a kernel. The message is that of MPSFallback.mm in torch 2.13.
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

}  // namespace

// Rejects sizes of which neither divides the other, because AdaptivePooling.mm does not support them.
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

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&without_kernel>()); }

// These run on the CPU with or without PYTORCH_ENABLE_MPS_FALLBACK (MPSFallback.mm in torch 2.13).
TORCH_LIBRARY_IMPL(aten, MPS, m) {
  for (const char* name : {"embedding_renorm_", "linalg_svd", "linalg_svd.U"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&always_on_cpu>());
}

}  // namespace virtual_mac
