// Attention forward from C++, by the CUDA driver alone: reads the manifest that `flashgen generate` wrote, loads one of its cubins and
// launches it. No Python, no PyTorch, no CUDA runtime, no compiler where it runs.
//
//   attention KERNELS PROBLEM BATCH HEADS_Q HEADS_KV LEN_Q LEN_KV SCALE INPUTS OUTPUTS
//
// KERNELS is the folder; PROBLEM says which of its kernels: bf16_d64_causal, or fp16_d192x128_full where head_dim_v differs. The file
// INPUTS holds q [batch, len_q, heads_q, head_dim], k [batch, len_kv, heads_kv, head_dim] and v [batch, len_kv, heads_kv, head_dim_v], one
// behind the other, in the kernel's element type; OUTPUTS gets out [batch, len_q, heads_q, head_dim_v] in that type and lse [batch,
// heads_q, len_q] in fp32.
//
// It takes kernels of the family attention_forward, which is there for every architecture from sm_80 on; what it sets is what
// `AttentionForward.program` (codegen/families/attention_forward/family.py) gives for dense tensors without modifiers.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "json.h"
#include "parameters.h"

namespace {

struct Sizes {
  uint64_t batch, heads_q, heads_kv, len_q, len_kv;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// What PROBLEM must be for a kernel; empty for one that this program cannot launch: another family's, one with modifiers or of packed
// sequences, whose problems have further fields, or one that was chosen for some lengths.
std::string name_of_problem(const json::Value& kernel) {
  const json::Value& spec = kernel.at("spec");
  const json::Value& problem = spec.at("problem");
  if (spec.at("family").text != "attention_forward" || !kernel.at("bucket").is_null() || kernel.has("workloads")) return "";
  static const std::set<std::string> known{"pass", "dtype", "head_dim", "head_dim_v", "mask"};
  for (const auto& field : problem.members) {
    if (known.count(field.first) == 0) return "";
  }
  const int head_dim = problem.at("head_dim").number, head_dim_v = problem.at("head_dim_v").number;
  const std::string width = std::to_string(head_dim) + (head_dim_v == head_dim ? "" : "x" + std::to_string(head_dim_v));
  return problem.at("dtype").text + "_d" + width + "_" + problem.at("mask").text;
}

// The problem's kernel for this architecture: '9.0' is sm_90a in a manifest, with the suffix of the instructions that only it has.
const json::Value& find_kernel(const json::Value& manifest, const std::string& folder, const char* problem, int major, int minor) {
  const std::string plain = "sm_" + std::to_string(major) + std::to_string(minor);
  std::string there;
  for (const json::Value& kernel : manifest.at("kernels").items) {
    const std::string name = name_of_problem(kernel);
    if (name.empty()) continue;
    const std::string& target = kernel.at("spec").at("target").text;
    if (name == problem && (target == plain || target == plain + "a")) return kernel;
    there += (there.empty() ? "" : ", ") + name + " for " + target;
  }
  throw std::runtime_error(folder + " must hold an attention_forward kernel of " + problem + " for " + plain +
                           ", this GPU's architecture, and for all lengths; got " + (there.empty() ? "none of any problem" : there));
}

// What the kernel multiplies with in place of a division: ceil(2^64 / divisor), and 0 for 1.
uint64_t reciprocal(uint64_t divisor) { return divisor == 1 ? 0 : static_cast<uint64_t>((((__uint128_t)1 << 64) + divisor - 1) / divisor); }

// Strides, in elements, of a dense tensor [batch, length, heads, width].
void set_strides(Parameters& parameters, const std::string& tensor, uint64_t length, uint64_t heads, uint64_t width) {
  parameters.set(tensor + "_batch", length * heads * width);
  parameters.set(tensor + "_row", heads * width);
  parameters.set(tensor + "_head", width);
}

void set_sizes(Parameters& parameters, const Sizes& sizes, uint64_t head_dim, uint64_t head_dim_v, uint64_t query_tiles) {
  set_strides(parameters, "q", sizes.len_q, sizes.heads_q, head_dim);
  set_strides(parameters, "k", sizes.len_kv, sizes.heads_kv, head_dim);
  set_strides(parameters, "v", sizes.len_kv, sizes.heads_kv, head_dim_v);
  set_strides(parameters, "out", sizes.len_q, sizes.heads_q, head_dim_v);
  // One head at a time shares the L2: another number changes the order of the blocks, and the time, but no bit.
  const uint64_t l2_group_heads = 1, l2_group_tiles = l2_group_heads * query_tiles;
  parameters.set("heads_q", sizes.heads_q);
  parameters.set("len_q", sizes.len_q);
  parameters.set("len_kv", sizes.len_kv);
  parameters.set("query_tiles", query_tiles);
  parameters.set("l2_group_heads", l2_group_heads);
  parameters.set("l2_group_tiles", l2_group_tiles);
  parameters.set("heads_q_reciprocal", reciprocal(sizes.heads_q));
  parameters.set("group_reciprocal", reciprocal(sizes.heads_q / sizes.heads_kv));
  parameters.set("l2_group_heads_reciprocal", reciprocal(l2_group_heads));
  parameters.set("l2_group_tiles_reciprocal", reciprocal(l2_group_tiles));
}

// Scores times scale_log2 are logarithms in base 2; ln 2 in two floats turns those back into scaled scores.
void set_scale(Parameters& parameters, float scale) {
  const float scale_log2 = static_cast<float>(static_cast<double>(scale) * std::log2(std::exp(1.0)));
  const double ln2 = static_cast<double>(scale) / static_cast<double>(scale_log2);
  parameters.set_float("scale_log2", scale_log2);
  parameters.set_float("ln2_hi", static_cast<float>(ln2));
  parameters.set_float("ln2_lo", static_cast<float>(ln2 - static_cast<double>(static_cast<float>(ln2))));
}

uint64_t positive(const char* name, const char* text) {
  char* end = nullptr;
  const long long number = std::strtoll(text, &end, 10);
  if (*end != '\0' || number < 1 || number > INT32_MAX) throw std::runtime_error(std::string(name) + " must be an integer from 1; got " + text);
  return static_cast<uint64_t>(number);
}

// From the smallest normal fp32 number to the largest one whose product with log2(e) is finite. As in Python, it is rounded to fp32.
float positive_scale(const char* text) {
  char* end = nullptr;
  const double scale = std::strtod(text, &end);
  if (*end != '\0' || !(scale >= FLT_MIN && scale <= 0x1.62e42ep127)) {
    throw std::runtime_error(std::string("SCALE must be a number from 1.1755e-38 to 2.3587e+38; got ") + text);
  }
  return static_cast<float>(scale);
}

void run(char** arguments) {
  const std::string folder = arguments[1];
  const Sizes sizes{positive("BATCH", arguments[3]), positive("HEADS_Q", arguments[4]), positive("HEADS_KV", arguments[5]),
                    positive("LEN_Q", arguments[6]), positive("LEN_KV", arguments[7])};
  if (sizes.heads_q % sizes.heads_kv != 0) throw std::runtime_error("HEADS_Q must be a multiple of HEADS_KV");
  const float scale = positive_scale(arguments[8]);

  const std::string text = read_file(folder + "/manifest.json");
  const json::Value manifest = json::Reader(text).read();

  const Driver driver;
  driver.check(driver.init(0), "initialising the driver");
  int version = 0, major = 0, minor = 0;
  driver.check(driver.version(&version), "asking the driver for its version");
  if (version < 13000) throw std::runtime_error("driver must be 580 or newer (CUDA 13); got one for CUDA " + std::to_string(version / 1000));
  CUdevice device;
  CUcontext context;
  driver.check(driver.device(&device, 0), "finding a GPU");
  driver.check(driver.attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "asking for the architecture");
  driver.check(driver.attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "asking for the architecture");
  driver.check(driver.retain_context(&context, device), "making a context");
  driver.check(driver.set_context(context), "entering the context");

  const json::Value& kernel = find_kernel(manifest, folder, arguments[2], major, minor);
  const json::Value& problem = kernel.at("spec").at("problem");
  const uint64_t head_dim = problem.at("head_dim").number, head_dim_v = problem.at("head_dim_v").number;
  const uint64_t block_q = kernel.at("spec").at("config").at("block_q").number;
  const unsigned shared_bytes = kernel.at("shared_bytes").number, threads = kernel.at("threads").number;

  const std::string cubin = read_file(folder + "/" + kernel.at("cubin").text);
  CUmodule module;
  CUfunction function;
  driver.check(driver.load_module(&module, cubin.data()), "loading " + kernel.at("cubin").text);
  driver.check(driver.function(&function, module, kernel.at("name").text.c_str()), "finding " + kernel.at("name").text);
  driver.check(driver.set_function(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes), "allowing the shared memory");

  const uint64_t element = 2;  // bytes of bf16 and fp16
  const uint64_t q_bytes = sizes.batch * sizes.len_q * sizes.heads_q * head_dim * element;
  const uint64_t k_bytes = sizes.batch * sizes.len_kv * sizes.heads_kv * head_dim * element;
  const uint64_t v_bytes = sizes.batch * sizes.len_kv * sizes.heads_kv * head_dim_v * element;
  const uint64_t out_bytes = sizes.batch * sizes.len_q * sizes.heads_q * head_dim_v * element;
  const uint64_t lse_bytes = sizes.batch * sizes.heads_q * sizes.len_q * sizeof(float);
  const std::string inputs = read_file(arguments[9]);
  if (inputs.size() != q_bytes + k_bytes + v_bytes) {
    throw std::runtime_error(std::string(arguments[9]) + " must hold " + std::to_string(q_bytes + k_bytes + v_bytes) + " bytes, q, k and v; got " +
                             std::to_string(inputs.size()));
  }

  CUdeviceptr memory, results;
  driver.check(driver.allocate(&memory, inputs.size()), "allocating the inputs");
  driver.check(driver.allocate(&results, out_bytes + lse_bytes), "allocating the outputs");
  driver.check(driver.to_device(memory, inputs.data(), inputs.size()), "copying the inputs");

  const uint64_t query_tiles = (sizes.len_q + block_q - 1) / block_q;
  Parameters parameters(kernel.at("parameters").text);
  parameters.set("q", memory);
  parameters.set("k", memory + q_bytes);
  parameters.set("v", memory + q_bytes + k_bytes);
  parameters.set("out", results);
  parameters.set("lse", results + out_bytes);
  set_sizes(parameters, sizes, head_dim, head_dim_v, query_tiles);
  set_scale(parameters, scale);

  void* structs[] = {parameters.complete()};  // a kernel of flashgen has one parameter, the struct
  const uint64_t blocks = query_tiles * sizes.heads_q * sizes.batch;
  driver.check(driver.launch(function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, shared_bytes, nullptr, structs, nullptr), "launching");
  driver.check(driver.synchronize(), "running the kernel");

  std::vector<char> outputs(out_bytes + lse_bytes);
  driver.check(driver.from_device(outputs.data(), results, outputs.size()), "copying the outputs");
  std::ofstream file(arguments[10], std::ios::binary);
  file.write(outputs.data(), static_cast<std::streamsize>(outputs.size()));
  if (!file.flush()) throw std::runtime_error(std::string(arguments[10]) + " cannot be written");
  std::printf("%s: %llu blocks of %u threads\n", kernel.at("name").text.c_str(), static_cast<unsigned long long>(blocks), threads);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 11) {
    std::fprintf(stderr, "usage: attention KERNELS PROBLEM BATCH HEADS_Q HEADS_KV LEN_Q LEN_KV SCALE INPUTS OUTPUTS\n");
    return 2;
  }
  try {
    run(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention: %s\n", error.what());
    return 1;
  }
  return 0;
}
