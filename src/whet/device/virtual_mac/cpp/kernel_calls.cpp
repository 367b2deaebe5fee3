// Accounting for kernel calls: their number, the graphs that MPSGraph would cache for them, and the faults that apply.
#include "virtual_mac.h"

#include <unordered_map>

namespace virtual_mac {
namespace {

// MPS caches one graph per combination of operator, shapes and dtypes, of about 55 KB
// (pyg-team/pytorch_geometric#10689).
constexpr int64_t kBytesPerGraph = 55'000;

struct Graphs {
  std::mutex mutex;
  std::unordered_map<size_t, std::string> held;  // from the hash of a graph's key to memory allocated for the graph
  int64_t bytes = 0;
  int64_t hold_per_graph = 0;
};

Graphs& graphs() {
  static auto* one = new Graphs();
  return *one;
}

size_t mix(size_t so_far, size_t next) { return (so_far ^ next) * 0x100000001B3ull + (so_far >> 29); }

size_t key_of(const std::string& name, const std::vector<at::Tensor>& inputs) {
  size_t key = std::hash<std::string>()(name);
  for (const at::Tensor& tensor : inputs) {
    key = mix(key, tensor.defined() ? static_cast<size_t>(tensor.scalar_type()) : 0xFF);
    if (!tensor.defined()) continue;
    for (const int64_t size : tensor.sizes()) key = mix(key, static_cast<size_t>(size) + 0x9E3779B9);
  }
  return key;
}

void note_graph(const std::string& name, const std::vector<at::Tensor>& inputs) {
  const size_t key = key_of(name, inputs);
  std::lock_guard<std::mutex> lock(graphs().mutex);
  const auto [entry, is_new] = graphs().held.try_emplace(key);
  if (!is_new) return;
  const int64_t held = graphs().hold_per_graph;
  entry->second.assign(static_cast<size_t>(held), '\1');  // write, so that the system allocates the pages
  graphs().bytes += held > 0 ? held : kBytesPerGraph;
}

struct Faults {
  std::atomic<bool> any{false};  // read without the lock, because most programs have no faults
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Fault>> running;
  int64_t last = 0;
};

Faults& faults() {
  static auto* one = new Faults();
  return *one;
}

std::vector<std::shared_ptr<Fault>> running_faults() {
  if (!faults().any) return {};
  std::lock_guard<std::mutex> lock(faults().mutex);
  std::vector<std::shared_ptr<Fault>> found;
  for (const auto& [number, fault] : faults().running) found.push_back(fault);
  return found;
}

}  // namespace

KernelCall::KernelCall(const std::string& full_name, const std::vector<at::Tensor>& inputs)
    : name(full_name.substr(0, full_name.find('.'))), inputs(inputs), start(Clock::now()) {
  ++counters().num_kernels;
  note_graph(full_name, inputs);
}

// Does not hold the lock while faults run, because they may sleep or call Python.
void KernelCall::done(const std::vector<at::Tensor>& results) const {
  for (const auto& fault : running_faults()) fault->after(*this, results);
}

GraphCache graph_cache() {
  std::lock_guard<std::mutex> lock(graphs().mutex);
  return {static_cast<int64_t>(graphs().held.size()), graphs().bytes};
}

void clear_graph_cache() {
  std::lock_guard<std::mutex> lock(graphs().mutex);
  graphs().held.clear();
  graphs().bytes = 0;
}

void hold_per_graph(int64_t bytes) {
  std::lock_guard<std::mutex> lock(graphs().mutex);
  graphs().hold_per_graph = bytes;
}

int64_t start_fault(std::shared_ptr<Fault> fault) {
  std::lock_guard<std::mutex> lock(faults().mutex);
  faults().running.emplace(++faults().last, std::move(fault));
  faults().any = true;
  return faults().last;
}

void end_fault(int64_t fault) {
  std::lock_guard<std::mutex> lock(faults().mutex);
  faults().running.erase(fault);
  faults().any = !faults().running.empty();
}

}  // namespace virtual_mac
