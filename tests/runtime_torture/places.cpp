// Finds and moves addresses in graphs that are plain memory, for the sanitizers: with CUDA's own headers, and its functions
// made here.
//
//   places ROUNDS

#include "must.h"
#include "places.h"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

using places::Range;

struct Node {
  cudaGraphNodeType type = cudaGraphNodeTypeKernel;
  // Of a kernel: its arguments, and what an executable graph has in their place.
  std::vector<std::vector<uint8_t>> arguments, given;
  bool packed = false;
  uint64_t from = 0, to = 0;
  // What CUDA would own.
  std::vector<void*> pointers;
  std::vector<uint8_t> memory;
  size_t size = 0;

  void argue(uint64_t value, size_t before = 0, size_t after = 0) {
    std::vector<uint8_t> bytes(before + 8 + after);
    std::memcpy(bytes.data() + before, &value, 8);
    arguments.push_back(bytes);
    given.push_back(bytes);
  }
  uint64_t argument(size_t i, size_t at = 0) const {
    uint64_t value;
    std::memcpy(&value, given[i].data() + at, 8);
    return value;
  }
};

using Graph = std::vector<Node*>;

int64_t calls = 0;
// The call that fails, counted from now; none when negative.
int64_t fails = -1;
bool failing() { return fails >= 0 && fails-- == 0; }

size_t offset_of(const Node& node, size_t index) {
  size_t offset = 0;
  for (size_t i = 0; i < index; i++) offset += (node.arguments[i].size() + 7) / 8 * 8;
  return offset;
}

CUresult get(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* params) {
  calls++;
  if (failing()) return CUDA_ERROR_INVALID_HANDLE;
  auto& node = *reinterpret_cast<Node*>(handle);
  *params = {};
  // Kernels are named by their nodes, in either way.
  (node.arguments.size() % 2 ? reinterpret_cast<Node*&>(params->func) : reinterpret_cast<Node*&>(params->kern)) = &node;
  node.pointers.clear();
  if (node.packed) {
    node.memory.assign(offset_of(node, node.arguments.size()), 0);
    for (size_t i = 0; i < node.arguments.size(); i++) {
      std::memcpy(node.memory.data() + offset_of(node, i), node.arguments[i].data(), node.arguments[i].size());
    }
    node.size = node.memory.size();
    node.pointers = {CU_LAUNCH_PARAM_BUFFER_POINTER, node.memory.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &node.size,
                     CU_LAUNCH_PARAM_END};
    params->extra = node.pointers.data();
  } else {
    for (auto& argument : node.arguments) node.pointers.push_back(argument.data());
    node.pointers.push_back(nullptr);
    params->kernelParams = node.pointers.data();
  }
  return CUDA_SUCCESS;
}

CUresult set(CUgraphExec, CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS* params) {
  calls++;
  if (failing()) return CUDA_ERROR_INVALID_VALUE;
  auto& node = *reinterpret_cast<Node*>(handle);
  MUST(node.packed == (params->kernelParams == nullptr));
  if (node.packed) {
    MUST(*static_cast<size_t*>(params->extra[3]) == node.size);
    const auto* memory = static_cast<uint8_t*>(params->extra[1]);
    for (size_t i = 0; i < node.given.size(); i++) {
      std::memcpy(node.given[i].data(), memory + offset_of(node, i), node.given[i].size());
    }
  } else {
    for (size_t i = 0; i < node.given.size(); i++) {
      std::memcpy(node.given[i].data(), params->kernelParams[i], node.given[i].size());
    }
  }
  return CUDA_SUCCESS;
}

CUresult argument(const Node& node, size_t index, size_t* offset, size_t* bytes) {
  if (index >= node.arguments.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = offset_of(node, index);
  *bytes = node.arguments[index].size();
  return CUDA_SUCCESS;
}
CUresult of_function(CUfunction f, size_t i, size_t* o, size_t* b) { return argument(*reinterpret_cast<Node*>(f), i, o, b); }
CUresult of_kernel(CUkernel k, size_t i, size_t* o, size_t* b) { return argument(*reinterpret_cast<Node*>(k), i, o, b); }

}  // namespace

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made to fail"; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** found, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult*) {
  const std::string wanted = name;
  *found = wanted == "cuGraphKernelNodeGetParams"       ? reinterpret_cast<void*>(&get)
           : wanted == "cuGraphExecKernelNodeSetParams" ? reinterpret_cast<void*>(&set)
           : wanted == "cuFuncGetParamInfo"             ? reinterpret_cast<void*>(&of_function)
           : wanted == "cuKernelGetParamInfo"           ? reinterpret_cast<void*>(&of_kernel)
                                                        : nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  const auto& graph = *reinterpret_cast<Graph*>(handle);
  for (size_t i = 0; nodes && i < *count; i++) nodes[i] = reinterpret_cast<cudaGraphNode_t>(graph[i]);
  *count = graph.size();
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<Node*>(node)->type;
  return cudaSuccess;
}
cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, cudaMemcpy3DParms* params) {
  calls++;
  if (failing()) return cudaErrorInvalidValue;
  params->srcPtr.ptr = reinterpret_cast<void*>(reinterpret_cast<Node*>(node)->from);
  params->dstPtr.ptr = reinterpret_cast<void*>(reinterpret_cast<Node*>(node)->to);
  return cudaSuccess;
}
cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t node, cudaMemsetParams* params) {
  params->dst = reinterpret_cast<void*>(reinterpret_cast<Node*>(node)->to);
  return cudaSuccess;
}
}

namespace {

constexpr uint64_t base = 0x7f0000000000;
const Range input{base, 512}, output{base + 4096, 1024};

struct Case {
  Graph graph;
  std::vector<Range> allocated{output};
  places::Places places;

  Node& add() {
    graph.push_back(new Node);
    return *graph.back();
  }
  std::vector<bool> find(std::vector<Range> tensors = {input, output}) {
    places.find(reinterpret_cast<cudaGraph_t>(&graph), std::move(tensors), 1, allocated);
    return places.movable();
  }
  void point(std::vector<uint64_t> addresses) {
    std::vector<void*> raw;
    for (const uint64_t address : addresses) raw.push_back(reinterpret_cast<void*>(address));
    places.point(nullptr, raw.empty() ? nullptr : raw.data());
  }
  ~Case() {
    for (auto* node : graph) delete node;
  }
};

using Movable = std::vector<bool>;

void what_stays() {
  {
    Case c;
    c.add().argue(output.begin);
    auto& copy = c.add();
    copy.type = cudaGraphNodeTypeMemcpy;
    copy.from = input.begin + 8;
    MUST((c.find() == Movable{false, true}));
  }
  {
    Case c;
    auto& set = c.add();
    set.type = cudaGraphNodeTypeMemset;
    set.to = output.begin;
    MUST((c.find() == Movable{true, false}));
  }
  {
    // Memory of its own that something smaller had before; and something larger, which began before it or with it.
    Case c;
    c.allocated = {{output.begin + 512, 512}, output};
    MUST((c.find() == Movable{true, true}));
    c.allocated = {{output.begin, 2048}, output};
    MUST((c.find() == Movable{true, false}));
    c.allocated = {{output.begin - 512, 1024}, output};
    MUST((c.find() == Movable{true, false}));
    // An output that nobody allocated: an input or a weight.
    c.allocated = {};
    MUST((c.find() == Movable{true, false}));
    c.allocated = {input};
    MUST((c.find({input, input}) == Movable{false, false}));
    MUST((c.find({{base, 0}, output}) == Movable{false, false}));
  }
  {
    Case c;
    for (int i = 0; i < places::Places::most_kernels; i++) c.add().argue(input.begin);
    MUST((c.find() == Movable{true, true}));
    c.add().argue(input.begin);
    MUST((c.find() == Movable{false, true}));
  }
  {
    Case c;
    c.add().type = cudaGraphNodeTypeHost;
    MUST((c.find() == Movable{false, false}));
    c.graph[0]->type = cudaGraphNodeTypeEmpty;
    MUST((c.find() == Movable{true, true}));
  }
}

void what_fails() {
  Case c;
  c.add().argue(input.begin);
  c.add().argue(input.begin + 16);
  fails = 1;
  bool threw = false;
  try {
    c.find();
  } catch (const std::exception&) {
    threw = true;
  }
  MUST(threw && (c.places.movable() == Movable{false, false}));
  // Nothing is moved then.
  c.point({base * 2, base * 3});
  MUST(c.graph[0]->argument(0) == input.begin);
  MUST((c.find() == Movable{true, true}));
  fails = 1;
  threw = false;
  try {
    c.point({base * 2, 0});
  } catch (const std::exception&) {
    threw = true;
  }
  MUST(threw);
  // What was told to some is told to all the next time, wherever that is.
  c.point({});
  MUST(c.graph[0]->argument(0) == input.begin && c.graph[1]->argument(0) == input.begin + 16);
}

void any(std::mt19937_64& random) {
  const auto below = [&](uint64_t end) { return random() % end; };
  Case c;
  const size_t count = below(6);
  for (size_t i = 0; i < count; i++) {
    auto& node = c.add();
    node.packed = below(3) == 0;
    for (size_t j = below(9); j > 0; j--) {
      const size_t before = below(3) * 8, after = below(40);
      switch (below(4)) {
        case 0: node.argue(input.begin + below(input.bytes), before, after); break;
        case 1: node.argue(output.begin + below(output.bytes), before, after); break;
        case 2: node.argue(random(), before, after); break;
        default: node.argue(below(2) ? input.begin - 8 : output.begin + output.bytes, before, after);
      }
    }
  }
  const auto movable = c.find();
  for (int round = 0; round < 4; round++) {
    std::vector<uint64_t> to{below(3) ? base * 2 + below(100) * 512 : 0, below(3) ? base * 3 + below(100) * 512 : 0};
    if (below(5) == 0) to.clear();
    c.point(to);
    const auto moved = [&](uint64_t value) {
      for (size_t t = 0; t < 2; t++) {
        const auto& range = t ? output : input;
        if (range.has(value) && movable[t] && !to.empty() && to[t]) return to[t] + (value - range.begin);
      }
      return value;
    };
    for (const auto* node : c.graph) {
      for (size_t i = 0; i < node->arguments.size(); i++) {
        for (size_t at = 0; at + 8 <= node->arguments[i].size(); at += 8) {
          uint64_t was;
          std::memcpy(&was, node->arguments[i].data() + at, 8);
          MUST(node->argument(i, at) == moved(was));
        }
      }
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  what_stays();
  what_fails();
  std::mt19937_64 random(7);
  for (long round = std::atol(arguments[1]); round > 0; round--) any(random);
  std::printf("calls: %ld\n", static_cast<long>(calls));
}
