// Kernels of all other operators that MPS supports. One boxed function serves all of them: it calls the CPU kernel on
// the same memory.
#include "virtual_mac.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace virtual_mac {
namespace {

using torch::jit::Stack;

// Returns whether an operator accepts CPU tensors of any shape beside mps tensors. Other operators accept only
// zero-dimensional ones.
bool takes_cpu_tensors(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::index",        "aten::index_put",           "aten::index_put_",           "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::repeat_interleave",  "aten::_ctc_loss",            "aten::_ctc_loss_backward",
      "aten::_fused_adam_", "aten::_fused_adamw_",       "aten::_fused_sgd_",          "aten::_pack_padded_sequence",
      "aten::_pad_packed_sequence", "aten::copy_"};
  return names.count(op.operator_name().name) > 0;
}

// Maps mps tensors to the CPU tensors that represent them during one call.
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
    tensors_.push_back(tensor);
    aliases_.push_back(stand_in(tensor, is_written));
    if (is_written) written_.push_back(tensors_.size() - 1);
    return aliases_.back();
  }

  void copy_back_what_changed_shape() const {
    for (const size_t i : written_) {
      const at::Tensor &tensor = tensors_[i], &alias = aliases_[i];
      if (tensor.is_sparse()) {
        replace_sparse(tensor, alias);
      } else if (tensor.numel() == 0 && alias.sizes() != tensor.sizes()) {
        // Include gaps between strides in the size. For example, the solution of lstsq has gaps.
        const size_t bytes = at::detail::computeStorageNbytes(alias.sizes(), alias.strides(), alias.itemsize());
        tensor.resize_({static_cast<int64_t>(bytes / alias.itemsize())});
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
        cpu_alias(tensor).copy_(alias);
      }
    }
  }

  at::Tensor out(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (size_t i = 0; i < aliases_.size(); ++i)
      if (aliases_[i].is_same(result)) return tensors_[i];
    results_.push_back(to_mps(result));
    return results_.back();
  }

  const std::vector<at::Tensor>& inputs() const { return tensors_; }

  // Returns all tensors that the call wrote: new results and mutated arguments.
  std::vector<at::Tensor> results() const {
    std::vector<at::Tensor> all = results_;
    for (const size_t i : written_) all.push_back(tensors_[i]);
    return all;
  }

 private:
  static at::Tensor stand_in(const at::Tensor& tensor, bool is_written) {
    if (tensor.is_sparse()) return sparse_on_cpu(tensor);
    // An empty output must be resizable, and an alias is not.
    const bool may_grow = is_written && tensor.numel() == 0;
    return may_grow ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : cpu_alias(tensor);
  }

  bool takes_cpu_tensors_;
  std::vector<at::Tensor> tensors_, aliases_, results_;
  std::vector<size_t> written_;
};

bool is_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Seeds the default CPU generator from the next draw of the mps generator, and restores it at the end of the scope. For
// operators that draw random numbers but take no generator.
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

c10::IValue result_on_mps(const c10::IValue& value, Stand& stand) {
  if (value.isTensor()) return stand.out(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(stand.out(tensor));
  return list;
}

// Computes in float32 and rounds the results, for operators that support half precision on MPS but not on the CPU.
class Widened {
 public:
  // Returns whether an error means that the CPU has no half-precision kernel: "erfcx" not implemented for 'Half'.
  static bool helps(const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.find("not implemented for 'Half'") != std::string::npos ||
           text.find("not implemented for 'BFloat16'") != std::string::npos ||
           text.find("not implemented for 'ComplexHalf'") != std::string::npos;
  }

  c10::IValue in(const c10::IValue& value) {
    if (value.isTensor()) return widen(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(widen(tensor));
    return list;
  }

  // Rounds a result. If it is a mutated argument, it is rounded into the original tensor.
  c10::IValue out(const c10::IValue& value) {
    if (value.isTensor()) return narrow(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(narrow(tensor));
    return list;
  }

 private:
  at::Tensor widen(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const at::ScalarType type = tensor.scalar_type();
    if (type != at::kHalf && type != at::kBFloat16 && type != at::kComplexHalf) return tensor;
    if (type != at::kComplexHalf) narrow_type_ = type;
    narrow_.push_back(tensor);
    wide_.push_back(tensor.to(type == at::kComplexHalf ? at::kComplexFloat : at::kFloat));
    return wide_.back();
  }

  at::Tensor narrow(const at::Tensor& result) {
    for (size_t i = 0; i < wide_.size(); ++i) {
      if (!wide_[i].is_same(result)) continue;
      if (narrow_[i].sizes() != result.sizes()) narrow_[i].resize_(result.sizes());
      return narrow_[i].copy_(result);
    }
    if (!result.defined()) return result;
    if (result.scalar_type() == at::kComplexFloat) return result.to(at::kComplexHalf);
    return result.scalar_type() == at::kFloat ? result.to(narrow_type_) : result;
  }

  at::ScalarType narrow_type_ = at::kHalf;
  std::vector<at::Tensor> narrow_, wide_;
};

// Alerts like MPS if torch.use_deterministic_algorithms is enabled and the operator uses atomic additions, whose order
// varies (Indexing.mm, ScatterGather.mm, Sort.mm).
void refuse_varying_order(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  if (!at::globalContext().deterministicAlgorithms()) return;
  static const std::map<std::string, const char*> alerts{
      {"aten::_index_put_impl", "index_put_with_accumulate_mps"}, {"aten::index_add", "index_put_with_accumulate_mps"},
      {"aten::index_reduce", "index_reduce_mps"},                 {"aten::scatter", "scatter_reduce_mps"},
      {"aten::scatter_add", "scatter_reduce_mps"},                {"aten::scatter_reduce", "scatter_reduce_mps"},
      {"aten::kthvalue", "kthvalue MPS"}};
  std::string name = op.operator_name().name;
  if (name.back() == '_') name.pop_back();
  const auto alert = alerts.find(name);
  if (alert == alerts.end()) return;
  bool adds = name != "aten::scatter";
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (arguments[i].name() == "accumulate") adds = value.toBool();
    if (arguments[i].name() == "reduce") adds = value.toStringRef() != "amin" && value.toStringRef() != "amax";
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 0) return;
  }
  const at::ScalarType type = stack[first].toTensor().scalar_type();
  const bool rounds = at::isFloatingType(type) || at::isComplexType(type);
  if (name == "aten::kthvalue" || (adds && rounds)) at::globalContext().alertNotDeterministic(alert->second);
}

void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size(), first = stack->size() - num_arguments;
  const std::vector<c10::IValue> arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  try {
    return op.callBoxed(stack);
  } catch (const c10::Error& error) {
    if (!Widened::helps(error)) throw;
  }
  Widened widened;
  stack->resize(first);
  for (const c10::IValue& argument : arguments) stack->push_back(widened.in(argument));
  op.callBoxed(stack);
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = widened.out((*stack)[i]);
}

}  // namespace

std::string name_of(const c10::OperatorHandle& op) {
  const auto& full = op.operator_name();
  const std::string name = full.name.substr(full.name.rfind(':') + 1);
  return full.overload_name.empty() ? name : name + "." + full.overload_name;
}

void compute_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  refuse_varying_order(op, *stack, first);
  Stand stand(takes_cpu_tensors(op));
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    has_generator = has_generator || is_generator(arguments[i]);
    (*stack)[first + i] = argument_on_cpu((*stack)[first + i], arguments[i], stand);
  }
  const KernelCall call(name_of(op), stand.inputs());
  {
    LentDraw lent(!has_generator && op.hasTag(at::Tag::nondeterministic_seeded));
    call_on_cpu(op, stack);
  }
  stand.copy_back_what_changed_shape();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = result_on_mps((*stack)[i], stand);
  call.done(stand.results());
}

void register_kernels(const std::vector<std::string>& operators, bool is_sparse) {
  const auto key = is_sparse ? c10::DispatchKey::SparseMPS : c10::DispatchKey::MPS;
  // Do not delete the library, so that the kernels stay registered until the process exits.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  static const std::unordered_set<std::string> pools{"_adaptive_avg_pool2d", "adaptive_avg_pool2d.out"};
  for (const std::string& name : operators)
    library->impl(name.c_str(), pools.count(name)
                                    ? torch::CppFunction::makeFromBoxedFunction<&adaptive_pool>()
                                    : torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

}  // namespace virtual_mac
