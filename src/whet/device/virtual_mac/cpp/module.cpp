// The door for Python: what install() sets and what stats() reads.
#include "virtual_mac.h"

#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace virtual_mac;
  namespace py = pybind11;

  m.def("configure",
        [](size_t recommended_bytes, size_t max_buffer_bytes, bool has_fallback, unsigned macos_major,
           unsigned macos_minor, std::string torch_commit) {
          Settings& to = settings();
          to.recommended_bytes = recommended_bytes;
          to.max_buffer_bytes = max_buffer_bytes;
          to.has_fallback = has_fallback;
          to.macos_major = macos_major;
          to.macos_minor = macos_minor;
          to.torch_commit = std::move(torch_commit);
          forget_watermarks();
        },
        py::kw_only(), py::arg("recommended_bytes"), py::arg("max_buffer_bytes"), py::arg("has_fallback"),
        py::arg("macos_major"), py::arg("macos_minor"), py::arg("torch_commit"));
  m.def("set_available", [](bool is_available) { settings().is_available = is_available; });
  m.def("set_native_operators",
        [](std::vector<std::string> names) { settings().native_operators = {names.begin(), names.end()}; });
  m.def("register_native_kernels", &register_native_kernels);
  m.def("set_held_by_others", &set_held_by_others);
  m.def("reset_stats", [] {
    counters().num_syncs = 0;
    std::lock_guard<std::mutex> lock(counters().mutex);
    counters().fallbacks.clear();
    reset_peak();
  });
  m.def("stats", [] {
    const MemoryNumbers memory = memory_numbers();
    py::dict found;
    found["num_syncs"] = counters().num_syncs.load();
    found["num_allocations"] = memory.num_allocations;
    found["allocated"] = memory.allocated;
    found["peak"] = memory.peak;
    found["reserved"] = memory.reserved;
    std::lock_guard<std::mutex> lock(counters().mutex);
    found["fallbacks"] = py::cast(counters().fallbacks);
    return found;
  });
}
