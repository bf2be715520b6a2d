// A kernel's `Parameters` struct, laid out from the manifest's `parameters`: "const Element* q, ..., i64 q_batch, ..., float ln2_lo".
// Fields stand by falling size, so that C adds no padding between them.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

class Parameters {
 public:
  explicit Parameters(const std::string& signature) {
    std::istringstream fields(signature);
    std::string field;
    while (std::getline(fields, field, ',')) {
      const size_t blank = field.rfind(' ');
      const std::string name = field.substr(blank + 1);
      std::string type = field.substr(0, blank);
      type.erase(0, type.find_first_not_of(' '));
      if (type == "TensorMap") throw std::runtime_error("parameters must have no tensor map: generate with --family attention_forward");
      const size_t bytes = type == "int" || type == "float" ? 4 : 8;
      fields_[name] = {type.back() == '*' ? "pointer" : type, bytes_.size()};
      missing_.insert(name);
      bytes_.resize(bytes_.size() + bytes);
    }
    bytes_.resize((bytes_.size() + 7) / 8 * 8);  // as the struct, which is aligned to 8 bytes
  }

  void set(const std::string& name, uint64_t address_or_number) {
    const Field& field = find(name);
    if (field.type == "int") store(name, static_cast<int32_t>(address_or_number));
    else if (field.type != "float") store(name, address_or_number);
    else throw std::runtime_error("parameter " + name + " must not be a float");
  }

  void set_float(const std::string& name, float value) {
    if (find(name).type != "float") throw std::runtime_error("parameter " + name + " must be a float");
    store(name, value);
  }

  // The struct. Throws if a field was given no value: the kernel is then not of the family that this program knows.
  void* complete() {
    if (!missing_.empty()) throw std::runtime_error("parameter " + *missing_.begin() + " is not known here: generate with --family attention_forward");
    return bytes_.data();
  }

  size_t size() const { return bytes_.size(); }

 private:
  struct Field {
    std::string type;
    size_t offset;
  };

  const Field& find(const std::string& name) const {
    const auto found = fields_.find(name);
    if (found == fields_.end()) throw std::runtime_error("kernel has no parameter " + name + ": generate with --family attention_forward");
    return found->second;
  }

  template <typename T>
  void store(const std::string& name, T value) {
    std::memcpy(bytes_.data() + find(name).offset, &value, sizeof value);
    missing_.erase(name);
  }

  std::map<std::string, Field> fields_;
  std::set<std::string> missing_;
  std::vector<unsigned char> bytes_;
};
