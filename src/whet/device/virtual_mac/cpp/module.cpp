// The Python bindings.
#include "virtual_mac.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

namespace virtual_mac {
namespace {

namespace py = pybind11;

// Wraps a Python function as a condition. It acquires the GIL, because kernels run in any thread and without the GIL.
Condition asks_python(py::object function) {
  if (function.is_none()) return nullptr;
  std::shared_ptr<py::object> held(new py::object(std::move(function)), [](py::object* last) {
    py::gil_scoped_acquire lock;
    delete last;
  });
  return [held](const std::vector<at::Tensor>& inputs) {
    py::gil_scoped_acquire lock;
    try {
      py::tuple words(inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) words[i] = py::cast(inputs[i]);
      return py::cast<bool>(py::bool_((*held)(*words)));
    } catch (py::error_already_set& error) {
      TORCH_CHECK(false, "the condition of a simulated fault failed: ", error.what());
    }
  };
}

}  // namespace
}  // namespace virtual_mac

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
  m.def("cpu_alias", &cpu_alias);
  m.def("is_accelerator", &is_accelerator);
  m.def("wait_for_gpu", &wait_for_gpu);
  m.def("set_native_operators",
        [](std::vector<std::string> names) { settings().native_operators = {names.begin(), names.end()}; });
  m.def("register_kernels", &register_kernels, py::arg("operators"), py::kw_only(), py::arg("is_sparse"));
  m.def("hold_more", &hold_more);
  m.def("kill_above", &kill_above);
  m.def("hold_per_graph", &hold_per_graph);
  m.def("start_miscompute", [](std::string operator_name, double relative_error, py::object when) {
    return start_fault(miscompute(std::move(operator_name), relative_error, asks_python(std::move(when))));
  });
  m.def("start_gpu_failure",
        [](std::string operator_name, int64_t after_kernels, int64_t times, bool is_watchdog, bool raises) {
          return start_fault(gpu_failure(std::move(operator_name), after_kernels, times, is_watchdog, raises));
        });
  m.def("start_driver_growth", [](size_t bytes) { return start_fault(driver_growth(bytes)); });
  m.attr("reports_failures") = std::make_pair(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR) >= std::make_pair(2, 15);
  m.def("start_heat", [](double slowdown, double after, double over, bool in_seconds) {
    return start_fault(heat(slowdown, after, over, in_seconds));
  });
  m.def("end_fault", &end_fault);
  m.def("slowdown_now", &slowdown_now);
  m.def("seed_of_next_draw", &seed_of_next_draw);
  m.def("reset_stats", [] {
    counters().num_syncs = 0;
    counters().num_kernels = 0;
    std::lock_guard<std::mutex> lock(counters().mutex);
    counters().fallbacks.clear();
    reset_peak();
  });
  m.def("stats", [] {
    const MemoryNumbers memory = memory_numbers();
    py::dict found;
    found["num_syncs"] = counters().num_syncs.load();
    found["num_kernels"] = counters().num_kernels.load();
    found["num_allocations"] = memory.num_allocations;
    found["allocated"] = memory.allocated;
    found["peak"] = memory.peak;
    found["reserved"] = memory.reserved;
    found["graph_cache_entries"] = graph_cache().entries;
    found["graph_cache_bytes"] = graph_cache().bytes;
    py::dict fallbacks;
    std::lock_guard<std::mutex> lock(counters().mutex);
    for (const auto& [name, counted] : counters().fallbacks)
      fallbacks[py::str(name)] = py::make_tuple(counted.calls, counted.seconds);
    found["fallbacks"] = fallbacks;
    return found;
  });
}
