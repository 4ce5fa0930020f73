// Runs a file of ai3_ops.save in a program without Python:
//
//   #include <ai3_ops/model.h>
//   const auto model = ai3::Model::load("resnet50.ai3");
//   const std::vector<at::Tensor> outputs = model.run({image});
//
// The file is a safetensors file whose metadata has the plans as JSON (docs/decisions/container.md): programs, which one operator
// of ai3_ops runs, and the graph around them, whose nodes are PyTorch's operators, called by name. examples/cpp builds such a
// program.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <zlib.h>

#include <bit>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace ai3 {
namespace detail {

using Json = nlohmann::json;
using Tensors = std::vector<at::Tensor>;

[[noreturn]] inline void refuse(const std::string& reason) { throw std::runtime_error(reason); }
inline void need(bool holds, const std::string& reason) {
  if (!holds) refuse(reason);
}

// ---- The library, which defines the operators --------------------------------------------------------------------------------
#ifndef AI3_OPS_LIBRARY  // find_package(ai3_ops) defines them
#define AI3_OPS_LIBRARY ""
#endif
#ifndef AI3_OPS_VERSION
#define AI3_OPS_VERSION ""
#endif

// Loads it once: the file that AI3_OPS_LIBRARY in the environment names, or else the one that the program was built beside.
inline const Json& library() {
  static const Json registry = [] {
    const char* const asked = std::getenv("AI3_OPS_LIBRARY");
    const std::string path = asked ? asked : AI3_OPS_LIBRARY;
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (!handle) refuse(std::string("cannot load ") + path + ": " + dlerror());
    auto* const failure = reinterpret_cast<const char* (*)()>(dlsym(handle, "ai3_load_failure"));
    auto* const text = reinterpret_cast<const char* (*)(char*, int64_t)>(dlsym(handle, "ai3_registry"));
    need(failure && text, path + " is no library of ai3_ops");
    need(!*failure(), path + ": " + failure());
    char error[4096] = "";
    const char* const found = text(error, sizeof(error));
    need(found, path + ": " + error);
    return Json::parse(found);
  }();
  return registry;
}

// ---- The file ----------------------------------------------------------------------------------------------------------------
struct File {
  Json document;
  std::map<std::string, at::Tensor> tensors;  // views of the file in memory, which processes share
};

inline uint32_t checksum(const void* data, size_t size) {
  return static_cast<uint32_t>(crc32_z(0, static_cast<const Bytef*>(data), size));
}

// By PyTorch's names, and by safetensors'.
struct Type {
  at::ScalarType type;
  const char *name, *stored;
};
inline constexpr Type kTypes[] = {{at::kDouble, "float64", "F64"}, {at::kFloat, "float32", "F32"},
                                  {at::kHalf, "float16", "F16"},   {at::kBFloat16, "bfloat16", "BF16"},
                                  {at::kLong, "int64", "I64"},     {at::kInt, "int32", "I32"},
                                  {at::kShort, "int16", "I16"},    {at::kChar, "int8", "I8"},
                                  {at::kByte, "uint8", "U8"},      {at::kBool, "bool", "BOOL"}};
inline at::ScalarType type_of(const std::string& stored) {
  for (const Type& t : kTypes)
    if (stored == t.stored) return t.type;
  refuse("it has a tensor of type " + stored);
}

inline int64_t size_in(const Json& number) {
  const int64_t n = number.is_number_integer() ? number.get<int64_t>() : -1;
  need(n >= 0 && n < int64_t{1} << 48, number.dump() + " is no size");
  return n;
}

// Not nested so deeply that what walks through it by recursion could end the stack.
inline Json parsed(const std::string& text) {
  return Json::parse(text, [](int depth, Json::parse_event_t, Json&) {
    need(depth < 100, "its description is nested too deeply");
    return true;
  });
}

inline File read(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  need(in.good(), "it cannot be opened");
  const auto size = static_cast<int64_t>(in.tellg());
  uint64_t length = 0;
  in.seekg(0);
  in.read(reinterpret_cast<char*>(&length), sizeof(length));
  const bool fits = in.good() && length >= 2 && length <= 100u << 20 && static_cast<int64_t>(length) <= size - 8;
  need(fits && (8 + length) % 64 == 0, "it is no file of ai3_ops.save, or its beginning is missing");
  std::string raw(length, ' ');
  in.read(raw.data(), static_cast<std::streamsize>(length));
  need(in.good(), "it is cut off");
  const int64_t data = 8 + static_cast<int64_t>(length);
  const Json header = parsed(raw);
  const Json& metadata = header.at("__metadata__");
  const std::string text = metadata.at("ai3_ops").get<std::string>();
  need(metadata.at("check") == std::to_string(checksum(text.data(), text.size())), "its description was altered");
  const Json content = parsed(text);
  const Json& checks = content.at("checks");
  need(checks.size() + 1 == header.size(), "its list of tensors was altered");
  File file{content.at("document"), {}};
  at::Tensor all;
  if (size > data) all = at::from_file(path, /*shared=*/false, size, at::kByte);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const at::ScalarType type = type_of(entry.at("dtype").get<std::string>());
    const auto item = static_cast<int64_t>(c10::elementSize(type));
    std::vector<int64_t> sizes;
    int64_t count = 1;
    for (const Json& extent : entry.at("shape")) {
      sizes.push_back(size_in(extent));
      need(!__builtin_mul_overflow(count, sizes.back(), &count), "the description of its tensor " + name + " was altered");
    }
    const int64_t begin = size_in(entry.at("data_offsets").at(0)), end = size_in(entry.at("data_offsets").at(1));
    need(end >= begin && begin % item == 0 && (end - begin) % item == 0 && (end - begin) / item == count,
         "the description of its tensor " + name + " was altered");
    need(data + end <= size, "it is cut off: tensor " + name + " ends behind it");
    if (count == 0) {
      file.tensors[name] = at::empty(sizes, type);
      continue;
    }
    const at::Tensor part = all.slice(0, data + begin, data + end);
    need(checks.at(name) == checksum(part.const_data_ptr(), static_cast<size_t>(end - begin)),
         "its tensor " + name + " was altered");
    file.tensors[name] = part.view(type).view(sizes);
  }
  return file;
}

// ---- What runs ---------------------------------------------------------------------------------------------------------------
struct Operator {
  c10::OperatorHandle handle;
  explicit Operator(const std::string& name, const std::string& overload = "")
      : handle(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())) {}
};

// A program of packed weights: many layers in one call.
struct Region {
  std::string text;
  Tensors constants;

  Region(const Json& region, const File& file) : text(region.at("program").get<std::string>()) {
    for (const Json& constant : region.at("constants")) constants.push_back(tensor(constant, file));
  }
  static at::Tensor tensor(const Json& entry, const File& file) {
    const auto found = file.tensors.find(entry.at("name").get<std::string>());
    need(found != file.tensors.end(), "it lacks tensor " + entry.at("name").dump());
    if (!entry.contains("order")) return found->second;
    const auto order = entry.at("order").get<std::vector<int64_t>>();  // of the dimensions as they are stored
    std::vector<int64_t> dims(order.size());
    for (size_t d = 0; d < order.size(); d++) dims.at(static_cast<size_t>(order[d])) = static_cast<int64_t>(d);
    return found->second.permute(dims);
  }
  Tensors run(const Tensors& inputs) const {
    static const Operator program("ai3::_program");
    torch::jit::Stack stack{inputs, constants, text};
    program.handle.callBoxed(stack);
    return stack.at(0).toTensorVector();
  }
};

// A graph of such programs and of PyTorch's operators.
struct Graph {
  struct Node {
    enum class Kind { placeholder, constant, region, getitem, op, output } kind;
    int region = -1;
    at::Tensor constant;
    std::optional<c10::OperatorHandle> op;
    std::vector<Json> args;  // of an operator: one for each argument of its schema, null where it has the default
    std::vector<bool> given;
    Json value;  // of the output
  };
  std::vector<Node> nodes;
  std::vector<Region> regions;

  Graph(const Json& graph, const File& file) {
    std::map<std::string, size_t> index;
    std::map<std::string, int> of_name;
    std::map<std::string, at::Tensor> constants;
    for (const auto& [name, held] : graph.at("held").items()) {
      if (held.contains("region"))
        of_name[name] = static_cast<int>(regions.size()), regions.emplace_back(held.at("region"), file);
      else
        constants[name] = Region::tensor(held.at("tensor"), file);
    }
    for (const Json& row : graph.at("nodes")) {
      const std::string op = row.at(0), name = row.at(1), target = row.at(2);
      const Json &args = row.at(3), &kwargs = row.at(4);
      need(args.is_array() && !args.empty() && kwargs.is_array() && !kwargs.empty(),
           "its graph calls " + target + " without arguments");
      Node node{};
      if (op == "placeholder") {
        node.kind = Node::Kind::placeholder;
      } else if (op == "get_attr") {
        need(constants.count(target), "its graph reads " + target + ", which is not there");
        node.kind = Node::Kind::constant, node.constant = constants[target];
      } else if (op == "call_module") {
        need(of_name.count(target), "its graph calls " + target + ", which is not there");
        node.kind = Node::Kind::region, node.region = of_name[target];
        node.args.assign(args.begin() + 1, args.end());
      } else if (op == "output") {
        node.kind = Node::Kind::output, node.value = args.at(1);
      } else if (target == "operator.getitem") {
        node.kind = Node::Kind::getitem, node.args = {args.at(1), args.at(2)};
        need(node.args[1].is_number_integer(), "its graph takes an item by " + node.args[1].dump());
      } else {
        need(
            op == "call_function" && target.rfind("op.", 0) == 0,
            "between its programs is " + target + ", which needs Python (ai3_ops.explain shows what stayed outside of programs)");
        bind(node, target.substr(3), args, kwargs);
      }
      for (Json& arg : node.args) resolve(arg, index);
      resolve(node.value, index);
      index[name] = nodes.size();
      nodes.push_back(std::move(node));
    }
  }
  // Puts the place of each node that a value names, which comes before, for its name.
  static void resolve(Json& value, const std::map<std::string, size_t>& index) {
    if (!value.is_array()) return;
    if (!value.empty() && value.at(0) == "node") {
      const auto found = index.find(value.at(1).get<std::string>());
      need(found != index.end(), "its graph reads a node that is not there");
      value = Json{"node", found->second};
    } else {
      for (Json& v : value) resolve(v, index);
    }
  }
  static void bind(Node& node, const std::string& target, const Json& args, const Json& kwargs) {
    const size_t first = target.find('.'), second = target.find('.', first + 1);
    need(second != std::string::npos, "its graph calls " + target);
    const std::string space = target.substr(0, first), overload = target.substr(second + 1);
    need(space == "aten" || space == "ai3", "its graph calls " + target);
    const std::string name = space + "::" + target.substr(first + 1, second - first - 1);
    node.kind = Node::Kind::op;
    node.op = Operator(name, overload == "default" ? "" : overload).handle;
    const c10::FunctionSchema& schema = node.op->schema();
    need(!schema.is_mutable() && name != "aten::from_file", "its graph calls " + target);
    node.args.resize(schema.arguments().size()), node.given.resize(schema.arguments().size());
    need(args.size() - 1 <= node.args.size(), "it calls " + target + " with too many arguments");
    for (size_t i = 1; i < args.size(); i++) node.args[i - 1] = args[i], node.given[i - 1] = true;
    for (size_t i = 1; i < kwargs.size(); i++) {
      const auto at = schema.argumentIndexWithName(kwargs[i].at(0).get<std::string>());
      need(at.has_value(), "it calls " + target + " with " + kwargs[i].at(0).dump());
      node.args[static_cast<size_t>(*at)] = kwargs[i].at(1), node.given[static_cast<size_t>(*at)] = true;
    }
    for (size_t i = 0; i < node.args.size(); i++)
      need(node.given[i] || schema.arguments()[i].default_value(),
           "it calls " + target + " without " + schema.arguments()[i].name());
  }

  using Values = std::vector<c10::IValue>;
  static const c10::IValue& named(const Json& value, const Values& values) { return values.at(value.at(1).get<size_t>()); }
  // A value of the file as an operator's argument of that type.
  static c10::IValue value(const Json& v, const c10::TypePtr& type, const Values& values) {
    if (type->kind() == c10::TypeKind::OptionalType) {
      if (v.is_null()) return {};
      return value(v, type->expectRef<c10::OptionalType>().getElementType(), values);
    }
    if (v.is_array()) {
      const std::string word = v.at(0);
      if (word == "node") return named(v, values);
      if (word == "list" || word == "tuple") return list(v, type, values);
      if (word == "torch") return constant(v.at(1).get<std::string>());
      if (word == "device") return c10::Device(v.at(1).get<std::string>());
      if (word == "float") return std::stod(v.at(1).get<std::string>());
      refuse("its graph has a value " + v.dump());
    }
    if (v.is_null()) return {};
    if (v.is_boolean()) return v.get<bool>();
    if (v.is_string()) return v.get<std::string>();
    if (v.is_number_float() || type->kind() == c10::TypeKind::FloatType) return v.get<double>();
    return v.get<int64_t>();
  }
  static c10::IValue list(const Json& v, const c10::TypePtr& type, const Values& values) {
    need(type->kind() == c10::TypeKind::ListType, "its graph has a list where an operator takes none");
    const c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
    c10::impl::GenericList made(element->kind() == c10::TypeKind::SymIntType ? c10::TypePtr(c10::IntType::get()) : element);
    for (size_t i = 1; i < v.size(); i++) made.push_back(value(v[i], element, values));
    return made;
  }
  static c10::IValue constant(const std::string& name) {
    for (const Type& t : kTypes)
      if (name == t.name) return static_cast<int64_t>(t.type);
    if (name == "strided") return static_cast<int64_t>(at::kStrided);
    if (name == "contiguous_format") return static_cast<int64_t>(at::MemoryFormat::Contiguous);
    if (name == "channels_last") return static_cast<int64_t>(at::MemoryFormat::ChannelsLast);
    if (name == "preserve_format") return static_cast<int64_t>(at::MemoryFormat::Preserve);
    refuse("its graph has a value torch." + name);
  }

  Tensors run(const Tensors& inputs) const {
    Values values(nodes.size());
    size_t input = 0;
    Tensors results;
    for (size_t i = 0; i < nodes.size(); i++) {
      const Node& node = nodes[i];
      switch (node.kind) {
        case Node::Kind::placeholder: values[i] = inputs.at(input++); break;
        case Node::Kind::constant: values[i] = node.constant; break;
        case Node::Kind::region: {
          Tensors given;
          for (const Json& arg : node.args) given.push_back(named(arg, values).toTensor());
          const Tensors made = regions[static_cast<size_t>(node.region)].run(given);
          values[i] = made.size() > 1 ? c10::IValue(made) : c10::IValue(made.at(0));
          break;
        }
        case Node::Kind::getitem: {
          const int64_t at = node.args[1].get<int64_t>();
          const c10::IValue& from = named(node.args[0], values);
          if (from.isTuple())
            values[i] = from.toTupleRef().elements().at(static_cast<size_t>(at));
          else
            values[i] =
                from.toListRef().at(static_cast<size_t>(at < 0 ? at + static_cast<int64_t>(from.toListRef().size()) : at));
          break;
        }
        case Node::Kind::op: {
          const auto& arguments = node.op->schema().arguments();
          torch::jit::Stack stack;
          for (size_t a = 0; a < arguments.size(); a++)
            stack.push_back(node.given[a] ? value(node.args[a], arguments[a].type(), values) : *arguments[a].default_value());
          node.op->callBoxed(stack);
          values[i] = stack.size() == 1 ? stack.front() : c10::IValue(c10::ivalue::Tuple::create(std::move(stack)));
          break;
        }
        case Node::Kind::output: collect(node.value, values, results); break;
      }
    }
    return results;
  }
  static void collect(const Json& v, const Values& values, Tensors& results) {
    need(v.is_array(), "it returns " + v.dump() + ", which is no tensor");
    if (v.at(0) != "node") {
      for (size_t i = 1; i < v.size(); i++) collect(v[i], values, results);
      return;
    }
    const c10::IValue& found = named(v, values);
    if (found.isTensor())
      results.push_back(found.toTensor());
    else
      for (const at::Tensor& t : found.toTensorVector()) results.push_back(t);
  }
};

using Plan = std::variant<Region, Graph>;
inline Plan plan_of(const Json& plan, const File& file) {
  if (plan.contains("region")) return Region(plan.at("region"), file);
  return Graph(plan.at("graph"), file);
}

inline Json shape_text(const at::Tensor& t, size_t start) {
  Json shape{"tuple"};
  if (t.dim() == 0 && start > 0) return nullptr;  // one number has no batch
  for (size_t d = start; d < static_cast<size_t>(t.dim()); d++) shape.push_back(t.size(static_cast<int64_t>(d)));
  return shape;
}
inline Json dtype_text(const at::Tensor& t) {
  for (const Type& known : kTypes)
    if (t.scalar_type() == known.type) return Json{"torch", known.name};
  return Json{"torch", "another dtype"};
}
// What a plan holds for, as the file writes it: sizes, without the batch where any will do (`dynamic`), and types. No key of the
// one kind is one of the other.
inline std::string key_of(const Tensors& inputs, bool dynamic) {
  if (inputs.size() == 1 && dynamic) return Json{"tuple", shape_text(inputs[0], 1), dtype_text(inputs[0])}.dump();
  std::vector<int64_t> batches;
  for (const at::Tensor& t : inputs) {
    const int64_t batch = dynamic && t.dim() > 0 ? t.size(0) : -1;
    if (dynamic && std::find(batches.begin(), batches.end(), batch) == batches.end()) batches.push_back(batch);
  }
  const size_t start = batches.size() == 1 ? 1 : 0;  // of several batches a plan is for these
  Json key{"tuple", batches.size()};
  for (const at::Tensor& t : inputs) key.push_back(Json{"tuple", shape_text(t, start), dtype_text(t), t.device().str()});
  return key.dump();
}

}  // namespace detail

// A network that ai3_ops.optimize made and ai3_ops.save wrote. Copies share it; `run` may be called from several threads at once.
class Model {
 public:
  // std::runtime_error, with the reason, where the file is missing, damaged, of another version or instruction set, or has what
  // only Python runs. Weights are mapped, not copied: the file must stay as it is.
  static Model load(const std::string& path) {
    try {
      return Model(detail::read(path));
    } catch (const std::exception& error) {
      throw std::runtime_error("ai3::Model::load: " + path + ": " + error.what());
    }
  }

  // The outputs' tensors for those of the inputs, each in the order in which Python's call has them: positional ones, then those
  // by name, nested ones flattened. CPU tensors of the sizes that were planned, or of these with another batch. For inference.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    const c10::InferenceMode guard;
    for (const bool dynamic : {true, false}) {
      const auto found = shared_->plans.find(detail::key_of(inputs, dynamic));
      if (found != shared_->plans.end()) return std::visit([&](const auto& body) { return body.run(inputs); }, *found->second);
    }
    std::string got;
    for (const at::Tensor& t : inputs)
      got += (got.empty() ? "" : ", ") + detail::Json(t.sizes().vec()).dump() + " " + toString(t.scalar_type());
    throw std::runtime_error("ai3::Model::run: optimized for inputs of sizes " + shared_->shown + ", got " +
                             (got.empty() ? "none" : got));
  }

 private:
  struct Shared {
    std::map<std::string, std::shared_ptr<const detail::Plan>> plans;
    std::string shown;  // of the example's inputs
  };
  explicit Model(const detail::File& file) {
    const detail::Json& document = file.document;
    detail::need(document.at("format") == 3, "it has format " + document.at("format").dump() + ", this version reads 3");
    const detail::Json& made_by = document.at("made_by");
    const std::string order = std::endian::native == std::endian::little ? "little" : "big";
    const std::pair<const char*, std::string> here[] = {
        {"byte order", order}, {"level", detail::library().at("level").get<std::string>()}, {"ai3_ops", AI3_OPS_VERSION}};
    for (const auto& [what, value] : here)
      detail::need(value.empty() || made_by.at(what) == value,
                   "it was saved with " + std::string(what) + " " + made_by.at(what).get<std::string>() +
                       ", and this process has " + value + ": optimize and save again here");
    auto shared = std::make_shared<Shared>();
    for (const detail::Json& entry : document.at("plans")) {
      const auto plan = std::make_shared<const detail::Plan>(detail::plan_of(entry.at("plan"), file));
      const detail::Json& keys = entry.at("keys");
      detail::need(keys.is_array() && !keys.empty(), "a plan of it is for no inputs");
      for (const detail::Json& key : keys) shared->plans.emplace(key.dump(), plan);
    }
    for (const detail::Json& shown : document.at("inputs").at("shown")) {
      if (shown == "list") continue;
      detail::need(shown.is_array() && shown.at(0) == "tuple", "an input of it is no tensor");
      detail::Json sizes(std::vector<detail::Json>(shown.begin() + 1, shown.end()));
      shared->shown += (shared->shown.empty() ? "" : ", ") + sizes.dump();
    }
    shared_ = std::move(shared);
  }
  std::shared_ptr<const Shared> shared_;
};

}  // namespace ai3
