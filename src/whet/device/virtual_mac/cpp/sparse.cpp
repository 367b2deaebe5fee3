// Sparse COO tensors. Their indices and values are ordinary mps tensors, and CPU kernels do the work.
#include "virtual_mac.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <torch/library.h>

namespace virtual_mac {
namespace {

at::Tensor same_with(const at::Tensor& tensor, at::Tensor (*move)(const at::Tensor&), c10::Device to) {
  const auto* impl = at::sparse::get_sparse_impl(tensor);
  return at::_sparse_coo_tensor_with_dims_and_tensors(impl->sparse_dim(), impl->dense_dim(), tensor.sizes(),
                                                      move(impl->indices()), move(impl->values()),
                                                      tensor.options().device(to), impl->coalesced());
}

}  // namespace

at::Tensor sparse_on_cpu(const at::Tensor& tensor) { return same_with(tensor, &cpu_alias, c10::Device(c10::kCPU)); }

at::Tensor sparse_to_mps(const at::Tensor& cpu_tensor) {
  check_dtype(cpu_tensor.scalar_type());
  return same_with(cpu_tensor, &to_mps, mps_device());
}

void replace_sparse(const at::Tensor& tensor, const at::Tensor& cpu_tensor) {
  const auto* from = at::sparse::get_sparse_impl(cpu_tensor);
  auto* to = at::sparse::get_sparse_impl(tensor);
  to->raw_resize_(from->sparse_dim(), from->dense_dim(), cpu_tensor.sizes());
  to->set_indices_and_values_unsafe(to_mps(from->indices()), to_mps(from->values()));
  to->set_coalesced(from->coalesced());
}

TORCH_LIBRARY_IMPL(aten, SparseMPS, m) {
  // PyTorch's own functions, which access the parts of a sparse tensor without computing anything.
  m.impl("empty.memory_format", &at::native::empty_sparse);
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
}

}  // namespace virtual_mac
