// Kernels of the virtual device that create, copy and view tensors.
#include "virtual_mac.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include <cstring>

namespace virtual_mac {

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble && dtype != at::kComplexDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
                   "Please use float32 instead.");
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  auto* keeps_alive = new c10::Storage(storage);
  c10::DataPtr data(storage.mutable_data(), keeps_alive, [](void* held) { delete static_cast<c10::Storage*>(held); },
                    c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_mps() ? cpu_alias(tensor) : tensor;
}

at::Tensor to_mps(const at::Tensor& cpu_tensor) {
  if (!cpu_tensor.defined()) return cpu_tensor;
  if (cpu_tensor.is_sparse()) return sparse_to_mps(cpu_tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(cpu_tensor.layout() == at::kStrided, "the virtual Mac has no tensors of layout ",
                              cpu_tensor.layout());
  check_dtype(cpu_tensor.scalar_type());
  at::Tensor made = at::detail::empty_strided_generic(cpu_tensor.sizes(), cpu_tensor.strides(), &allocator(), kMpsKeys,
                                                      cpu_tensor.scalar_type());
  if (cpu_tensor.numel() > 0) cpu_alias(made).copy_(cpu_tensor);
  return made;
}

namespace {

using Sizes = at::IntArrayRef;

// --- creation ---------------------------------------------------------------------------------------------------------

void check_num_dims(Sizes size) {
  TORCH_CHECK(size.size() <= 16, "MPS supports tensors with dimensions <= 16, but got ", size.size(), ".");
}

at::Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  check_num_dims(size);
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided, "only strided tensors are supported on MPS");
  return at::detail::empty_generic(size, &allocator(), kMpsKeys, type, format);
}

at::Tensor empty_strided(Sizes size, Sizes strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  check_num_dims(size);
  return at::detail::empty_strided_generic(size, strides, &allocator(), kMpsKeys, type);
}

const at::Tensor& resize_(const at::Tensor& self, Sizes size, std::optional<at::MemoryFormat> format) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t had = storage->nbytes();
  const size_t needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (needed > had) {
    auto data = allocator().allocate(needed);
    if (had > 0) std::memcpy(data.get(), storage->data(), had);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, strides);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(source), 0, {length}, {});
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  return set_storage_at(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true), 0, {0}, {});
}

// --- copies --------------------------------------------------------------------------------------------------------

// Copies within the device, to it or from it. A copy to the CPU waits for the GPU, as on a Mac.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (self.is_same(source) || source.numel() == 0) return self;
  if (self.device().is_cpu()) wait_for_gpu();
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor written = to;
  return copy_(written, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar one_value(const at::Tensor& self) {
  wait_for_gpu();
  return at::_local_scalar_dense(cpu_alias(self));
}

at::Tensor& zero_(at::Tensor& self) {
  on_cpu(self).zero_();
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_to_nothing);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);

  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &one_value);
  m.impl("zero_", &zero_);

  // Views use PyTorch's own functions, because they need no kernel.
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

}  // namespace virtual_mac
