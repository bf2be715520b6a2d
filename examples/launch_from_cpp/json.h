// Reads the JSON of a manifest: objects, arrays, texts, numbers, true, false and null. Errors are std::runtime_error.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace json {

struct Value {
  enum class Kind { kNull, kBool, kNumber, kText, kArray, kObject } kind = Kind::kNull;
  bool truth = false;
  double number = 0;
  std::string text;
  std::vector<Value> items;
  std::map<std::string, Value> members;

  bool is_null() const { return kind == Kind::kNull; }

  // A member that must be there.
  const Value& at(const std::string& name) const {
    const auto found = members.find(name);
    if (found == members.end()) throw std::runtime_error("manifest must have a field '" + name + "'");
    return found->second;
  }

  bool has(const std::string& name) const { return members.count(name) != 0; }
};

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  Value read() {
    const Value value = read_value();
    if (next() != '\0') fail("has more behind its end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("manifest " + what + " at byte " + std::to_string(position_));
  }

  // The next character that is not white space, without taking it.
  char next() {
    while (position_ < text_.size() && std::string(" \t\r\n").find(text_[position_]) != std::string::npos) ++position_;
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  bool take(char wanted) {
    if (next() != wanted) return false;
    ++position_;
    return true;
  }

  void require(char wanted) {
    if (!take(wanted)) fail(std::string("must have a '") + wanted + "'");
  }

  bool take_word(const std::string& word) {
    if (text_.compare(position_, word.size(), word) != 0) return false;
    position_ += word.size();
    return true;
  }

  Value read_value() {
    Value value;
    const char first = next();
    if (first == '{') {
      value.kind = Value::Kind::kObject;
      require('{');
      if (take('}')) return value;
      do {
        next();
        const std::string name = read_text();
        require(':');
        value.members[name] = read_value();
      } while (take(','));
      require('}');
    } else if (first == '[') {
      value.kind = Value::Kind::kArray;
      require('[');
      if (take(']')) return value;
      do value.items.push_back(read_value());
      while (take(','));
      require(']');
    } else if (first == '"') {
      value.kind = Value::Kind::kText;
      value.text = read_text();
    } else if (take_word("true") || take_word("false")) {
      value.kind = Value::Kind::kBool;
      value.truth = first == 't';
    } else if (!take_word("null")) {
      value.kind = Value::Kind::kNumber;
      char* end = nullptr;
      value.number = std::strtod(text_.c_str() + position_, &end);
      if (end == text_.c_str() + position_) fail("must have a value");
      position_ = end - text_.c_str();
    }
    return value;
  }

  // A text in quotes. Characters beyond ASCII, which a manifest writes as \uXXXX, become '?': no name has any.
  std::string read_text() {
    require('"');
    std::string text;
    while (position_ < text_.size() && text_[position_] != '"') {
      char c = text_[position_++];
      if (c == '\\' && position_ < text_.size()) {
        c = text_[position_++];
        if (c == 'n') c = '\n';
        else if (c == 't') c = '\t';
        else if (c == 'u') c = '?', position_ += 4;
      }
      text += c;
    }
    require('"');
    return text;
  }

  const std::string& text_;
  size_t position_ = 0;
};

}  // namespace json
