// Where a captured graph has the addresses of some tensors, so that a launch can be given others in their place.
//
// A captured kernel has its arguments by value in its node: an address in them is eight bytes that say it. They are found
// by looking for every value that lies in a tensor's memory. What is found so need not be all: an argument may hold an
// address in a form of its own. So whoever uses this proves it for each graph, by launches with other memory whose answers
// must be the same, bit by bit (src/runtime/graphs.rs).
//
// A tensor stays where it is when
// - a node that is no kernel has its address: a copy or a memset;
// - its memory was also given to something larger while the graph was captured, whose addresses would be moved with it but
//   which would not fit where they are moved to;
// - its memory is another tensor's too;
// - more than a few kernels have its address: telling one takes about as long as launching one.

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace places {

// Memory from an address on.
struct Range {
  uint64_t begin = 0;
  uint64_t bytes = 0;

  bool has(uint64_t address) const { return address >= begin && address - begin < bytes; }
  bool meets(const Range& other) const { return begin < other.begin + other.bytes && other.begin < begin + bytes; }
  bool holds(const Range& other) const {
    return other.begin >= begin && other.begin + other.bytes <= begin + bytes;
  }
};

inline void check(cudaError_t code) {
  if (code == cudaSuccess) return;
  // Said here: it is nobody else's.
  (void)cudaGetLastError();
  throw std::runtime_error(cudaGetErrorString(code));
}

// The driver's functions for kernels in graphs; the runtime's own know only kernels that it loaded itself.
struct Driver {
  decltype(&cuGraphKernelNodeGetParams) get = nullptr;
  decltype(&cuGraphExecKernelNodeSetParams) set = nullptr;
  decltype(&cuFuncGetParamInfo) of_function = nullptr;
  decltype(&cuKernelGetParamInfo) of_kernel = nullptr;

  static const Driver& loaded() {
    static const Driver driver = [] {
      Driver d;
      load("cuGraphKernelNodeGetParams", 12000, d.get);
      load("cuGraphExecKernelNodeSetParams", 12000, d.set);
      load("cuFuncGetParamInfo", 12040, d.of_function);
      load("cuKernelGetParamInfo", 12040, d.of_kernel);
      return d;
    }();
    return driver;
  }

  static void check(CUresult code, const char* what) {
    if (code != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + " failed with " + std::to_string(code));
  }

 private:
  template <class F>
  static void load(const char* name, unsigned version, F& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    places::check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result));
    if (!found) throw std::runtime_error(std::string("the driver has no ") + name);
    function = reinterpret_cast<F>(found);
  }
};

class Places {
 public:
  static constexpr std::ptrdiff_t most_kernels = 4;

  // Looks for the addresses of `tensors` in a graph: the first `inputs` of them are its inputs, the others its outputs.
  // `allocated` is what was allocated while it was captured. When it fails, nothing can be moved.
  void find(cudaGraph_t graph, std::vector<Range> tensors, size_t inputs, const std::vector<Range>& allocated) {
    tensors_ = std::move(tensors);
    movable_.assign(tensors_.size(), false);
    target_.assign(tensors_.size(), 0);
    nodes_.clear();
    now_.clear();
    for (const auto& tensor : tensors_) now_.push_back(tensor.begin);
    std::vector<bool> found = alone(inputs, allocated);
    size_t count = 0;
    check(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (const auto node : nodes) look(node, found);
    for (size_t i = 0; i < tensors_.size(); i++) {
      const auto has = [i](const Node& node) {
        return std::any_of(node.places.begin(), node.places.end(), [i](const Place& place) { return place.tensor == i; });
      };
      if (std::count_if(nodes_.begin(), nodes_.end(), has) > most_kernels) found[i] = false;
    }
    movable_ = std::move(found);
  }

  const std::vector<bool>& movable() const { return movable_; }

  // Makes the next launches of `exec` work on these addresses; null stands for the tensor's own.
  void point(cudaGraphExec_t exec, void* const* addresses) {
    std::vector<bool>& moved = scratch_;
    moved.assign(tensors_.size(), false);
    bool any = false;
    for (size_t i = 0; i < tensors_.size(); i++) {
      const bool own = !movable_[i] || !addresses || !addresses[i];
      const uint64_t to = own ? tensors_[i].begin : reinterpret_cast<uint64_t>(addresses[i]);
      if (to == now_[i]) continue;
      // Until all nodes say so it is nowhere.
      now_[i] = 0;
      target_[i] = to;
      moved[i] = any = true;
    }
    if (!any) return;
    const Driver& driver = Driver::loaded();
    for (auto& node : nodes_) {
      bool changed = false;
      for (const auto& place : node.places) {
        if (!moved[place.tensor]) continue;
        const uint64_t value = target_[place.tensor] + place.offset;
        std::memcpy(node.bytes.data() + place.at, &value, sizeof value);
        changed = true;
      }
      if (changed) Driver::check(driver.set(exec, node.node, &node.params), "pointing a kernel of a graph elsewhere");
    }
    for (size_t i = 0; i < tensors_.size(); i++) {
      if (moved[i]) now_[i] = target_[i];
    }
  }

 private:
  struct Place {
    size_t at;
    size_t tensor;
    uint64_t offset;
  };
  struct Node {
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS params;
    std::vector<uint8_t> bytes;
    std::vector<void*> arguments;
    std::unique_ptr<size_t> size;
    std::vector<Place> places;
  };

  // Which tensors have memory that nothing larger and no other tensor has. An output is the graph's own only where it was
  // allocated for it: one that is an input or a weight is not.
  std::vector<bool> alone(size_t inputs, const std::vector<Range>& allocated) const {
    std::vector<bool> alone(tensors_.size(), true);
    for (size_t i = 0; i < tensors_.size(); i++) {
      bool own = i < inputs;
      for (size_t j = 0; j < tensors_.size(); j++) {
        if (i != j && tensors_[i].meets(tensors_[j])) alone[i] = false;
      }
      for (const auto& one : allocated) {
        if (one.begin == tensors_[i].begin) own = true;
        if (tensors_[i].meets(one) && !tensors_[i].holds(one)) alone[i] = false;
      }
      if (tensors_[i].bytes == 0 || !own) alone[i] = false;
    }
    return alone;
  }

  void stays(uint64_t address, std::vector<bool>& found) const {
    for (size_t i = 0; i < tensors_.size(); i++) {
      if (tensors_[i].has(address)) found[i] = false;
    }
  }

  void look(cudaGraphNode_t node, std::vector<bool>& found) {
    cudaGraphNodeType type;
    check(cudaGraphNodeGetType(node, &type));
    switch (type) {
      case cudaGraphNodeTypeKernel:
        return kernel(node);
      case cudaGraphNodeTypeMemcpy: {
        cudaMemcpy3DParms copy{};
        check(cudaGraphMemcpyNodeGetParams(node, &copy));
        stays(reinterpret_cast<uint64_t>(copy.srcPtr.ptr), found);
        stays(reinterpret_cast<uint64_t>(copy.dstPtr.ptr), found);
        return;
      }
      case cudaGraphNodeTypeMemset: {
        cudaMemsetParams set{};
        check(cudaGraphMemsetNodeGetParams(node, &set));
        stays(reinterpret_cast<uint64_t>(set.dst), found);
        return;
      }
      case cudaGraphNodeTypeEmpty:
      case cudaGraphNodeTypeEventRecord:
      case cudaGraphNodeTypeWaitEvent:
        return;
      default:
        // What it works on can't be read.
        found.assign(found.size(), false);
    }
  }

  void kernel(cudaGraphNode_t graph_node) {
    const Driver& driver = Driver::loaded();
    Node node{graph_node, {}, {}, {}, {}, {}};
    Driver::check(driver.get(node.node, &node.params), "reading a kernel of a graph");
    if (!node.params.kernelParams) return packed(std::move(node));
    std::vector<size_t> offsets;
    for (size_t i = 0;; i++) {
      size_t offset = 0, bytes = 0;
      const CUresult code = node.params.func ? driver.of_function(node.params.func, i, &offset, &bytes)
                                             : driver.of_kernel(node.params.kern, i, &offset, &bytes);
      // There are no more.
      if (code == CUDA_ERROR_INVALID_VALUE) break;
      Driver::check(code, "reading a kernel's arguments");
      node.bytes.resize(offset + bytes);
      std::memcpy(node.bytes.data() + offset, node.params.kernelParams[i], bytes);
      offsets.push_back(offset);
      scan(node, offset, bytes);
    }
    if (node.places.empty()) return;
    for (const size_t offset : offsets) node.arguments.push_back(node.bytes.data() + offset);
    nodes_.push_back(std::move(node));
    // The vectors' memory has moved with it.
    nodes_.back().params.kernelParams = nodes_.back().arguments.data();
    nodes_.back().params.extra = nullptr;
  }

  // A kernel whose arguments were given as one piece of memory.
  void packed(Node node) {
    const void* memory = nullptr;
    size_t bytes = 0;
    for (void** option = node.params.extra; option && *option != CU_LAUNCH_PARAM_END; option += 2) {
      if (*option == CU_LAUNCH_PARAM_BUFFER_POINTER) memory = option[1];
      if (*option == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(option[1]);
    }
    if (!memory) return;
    node.bytes.resize(bytes);
    std::memcpy(node.bytes.data(), memory, bytes);
    scan(node, 0, bytes);
    if (node.places.empty()) return;
    nodes_.push_back(std::move(node));
    Node& kept = nodes_.back();
    kept.size = std::make_unique<size_t>(bytes);
    kept.arguments = {CU_LAUNCH_PARAM_BUFFER_POINTER, kept.bytes.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, kept.size.get(),
                      CU_LAUNCH_PARAM_END};
    kept.params.extra = kept.arguments.data();
  }

  void scan(Node& node, size_t from, size_t bytes) {
    for (size_t at = from; at + 8 <= from + bytes; at += 8) {
      uint64_t value;
      std::memcpy(&value, node.bytes.data() + at, sizeof value);
      for (size_t t = 0; t < tensors_.size(); t++) {
        if (tensors_[t].has(value)) node.places.push_back({at, t, value - tensors_[t].begin});
      }
    }
  }

  std::vector<Range> tensors_;
  std::vector<bool> movable_;
  std::vector<uint64_t> now_;
  std::vector<uint64_t> target_;
  std::vector<bool> scratch_;
  std::vector<Node> nodes_;
};

}  // namespace places
