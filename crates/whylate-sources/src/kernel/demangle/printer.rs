// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints parsed C++ names as c++filt does.

use std::fmt::{Result, Write};

use whylate_model::name::BoundedText;

use super::parser::{CONST, Id, LVALUE, Node, Nodes, RESTRICT, RVALUE, VOLATILE};

/// The maximum number of node visits. Substitutions refer to nodes any number of times, and an empty pack prints nothing.
const MAX_STEPS: u32 = 1 << 14;
/// The maximum depth of nested nodes, which substitutions nest deeper than the parser did.
const DEEPEST: u32 = 500;

/// Returns `None` if the name exceeds a limit other than its length.
pub(super) fn print(nodes: &Nodes<'_>, whole: Id, suffix: &str) -> Option<String> {
    let mut printer = Printer { nodes, text: BoundedText::default(), steps: 0, depth: 0, element: None };
    let printed = printer.whole(whole).and_then(|()| printer.copies(suffix));
    // A long name is cut.
    (printed.is_ok() || printer.is_within_limits()).then(|| printer.text.finish())
}

struct Printer<'a> {
    nodes: &'a Nodes<'a>,
    text: BoundedText,
    steps: u32,
    depth: u32,
    /// The index of the pack element that an expansion prints.
    element: Option<usize>,
}

impl<'a> Printer<'a> {
    fn node(&self, id: Id) -> &'a Node<'a> {
        let node = &self.nodes.all[id as usize];
        match node {
            Node::Argument(number) => {
                self.nodes.arguments.get(*number).map_or(node, |&of| &self.nodes.all[of as usize])
            }
            _ => node,
        }
    }

    /// Returns the node, or the pack element that an expansion prints for it.
    fn resolved(&self, id: Id) -> &'a Node<'a> {
        self.element_of(id).map_or_else(|| self.node(id), |element| self.node(element))
    }

    /// Returns the pack element that an expansion prints for a pack.
    fn element_of(&self, id: Id) -> Option<Id> {
        match (self.node(id), self.element) {
            (Node::Pack(all), Some(element)) => all.get(element).copied(),
            _ => None,
        }
    }

    fn is_within_limits(&self) -> bool {
        self.steps <= MAX_STEPS && self.depth <= DEEPEST
    }

    fn step(&mut self) -> Result {
        self.steps += 1;
        if self.is_within_limits() { Ok(()) } else { Err(std::fmt::Error) }
    }

    /// Prints one level deeper. The depth is not restored after an error.
    fn deeper(&mut self, print: impl FnOnce(&mut Self) -> Result) -> Result {
        self.depth += 1;
        self.step()?;
        print(self)?;
        self.depth -= 1;
        Ok(())
    }

    /// Prints a node, or the pack element for it. Packs inside an element do not take part in the expansion.
    fn visit(&mut self, id: Id, print: impl FnOnce(&mut Self, &'a Node<'a>) -> Result) -> Result {
        self.deeper(|printer| {
            let (node, before) = (printer.resolved(id), printer.element);
            if printer.element_of(id).is_some() {
                printer.element = None;
            }
            print(printer, node)?;
            printer.element = before;
            Ok(())
        })
    }

    fn whole(&mut self, id: Id) -> Result {
        self.left(id)?;
        self.right(id)
    }

    fn copies(&mut self, suffix: &str) -> Result {
        if suffix.is_empty() {
            return Ok(());
        }
        // A word and the numbers after it form one clone suffix.
        let mut is_open = false;
        for part in suffix[1..].split('.') {
            let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            if !(is_open && is_number) {
                self.text.write_str(if is_open { "] [clone ." } else { " [clone ." })?;
            } else {
                self.text.write_str(".")?;
            }
            self.text.write_str(part)?;
            is_open = true;
        }
        self.text.write_str("]")
    }

    fn list(&mut self, list: &[Id]) -> Result {
        let begin = self.text.len();
        for &id in list {
            let before = self.text.len();
            if before > begin {
                self.text.write_str(", ")?;
            }
            let behind = self.text.len();
            self.whole(id)?;
            // A pack may be empty.
            if self.text.len() == behind {
                self.text.truncate(before);
            }
        }
        Ok(())
    }

    fn parameters(&mut self, all: &[Id]) -> Result {
        self.text.write_str("(")?;
        self.list(all)?;
        self.text.write_str(")")
    }

    fn arguments(&mut self, all: &[Id]) -> Result {
        self.text.write_str(if self.text.last() == Some(b'<') { " <" } else { "<" })?;
        self.list(all)?;
        self.text.write_str(if self.text.last() == Some(b'>') { " >" } else { ">" })
    }

    fn qualifiers(&mut self, qualifiers: u8) -> Result {
        let all =
            [(CONST, " const"), (VOLATILE, " volatile"), (RESTRICT, " restrict"), (LVALUE, " &"), (RVALUE, " &&")];
        all.iter()
            .filter(|(qualifier, _)| qualifiers & qualifier != 0)
            .try_for_each(|(_, text)| self.text.write_str(text))
    }

    /// Prints the name of a class without its scope and arguments, as in the name of its constructor.
    fn base(&mut self, id: Id) -> Result {
        self.deeper(|printer| match printer.node(id) {
            Node::Scoped(_, id) | Node::Template(id, _) | Node::Tagged(id, _) => printer.base(*id),
            Node::Standard(_, base) => printer.text.write_str(base),
            _ => printer.whole(id),
        })
    }

    /// Returns the opening parenthesis of a pointer to this type, which arrays and functions need.
    fn is_wrapped(&mut self, id: Id) -> std::result::Result<Option<&'static str>, std::fmt::Error> {
        self.step()?;
        Ok(match self.resolved(id) {
            Node::Array(..) => Some(" ("),
            Node::FunctionType { .. } => Some("("),
            Node::Qualified(of, _) => self.is_wrapped(*of)?,
            _ => None,
        })
    }

    /// Returns whether the type has a part that follows the declared name.
    fn has_right(&mut self, id: Id) -> std::result::Result<bool, std::fmt::Error> {
        self.step()?;
        match self.resolved(id) {
            Node::Array(..) | Node::FunctionType { .. } => Ok(true),
            Node::Pointer(of, _) | Node::Member(_, of) | Node::Qualified(of, _) => self.has_right(*of),
            _ => Ok(false),
        }
    }

    fn left(&mut self, id: Id) -> Result {
        self.visit(id, Self::left_of)
    }

    fn left_of(&mut self, node: &'a Node<'a>) -> Result {
        match node {
            Node::Text(text) | Node::Standard(text, _) => self.text.write_str(text),
            Node::Scoped(scope, name) => {
                self.whole(*scope)?;
                self.text.write_str("::")?;
                self.whole(*name)
            }
            Node::Template(name, arguments) => {
                self.whole(*name)?;
                self.arguments(arguments)
            }
            Node::Constructor(class) => self.base(*class),
            Node::Destructor(class) => {
                self.text.write_str("~")?;
                self.base(*class)
            }
            Node::Conversion(to) => {
                self.text.write_str("operator ")?;
                self.whole(*to)
            }
            Node::LiteralOperator(name) => {
                self.text.write_str("operator\"\" ")?;
                self.whole(*name)
            }
            Node::Lambda(parameters, number) => {
                self.text.write_str("{lambda")?;
                self.parameters(parameters)?;
                write!(self.text, "#{number}}}")
            }
            Node::Unnamed(number) => write!(self.text, "{{unnamed type#{number}}}"),
            Node::Tagged(name, tag) => {
                self.whole(*name)?;
                write!(self.text, "[abi:{tag}]")
            }
            Node::Function { name, returns, parameters, qualifiers } => {
                if let Some(returns) = returns {
                    self.left(*returns)?;
                    if !self.has_right(*returns)? {
                        self.text.write_str(" ")?;
                    }
                }
                self.whole(*name)?;
                self.parameters(parameters)?;
                if let Some(returns) = returns {
                    self.right(*returns)?;
                }
                self.qualifiers(*qualifiers)
            }
            Node::Special(what, of) => {
                self.text.write_str(what)?;
                self.whole(*of)
            }
            Node::ConstructionTable(of, within) => {
                self.text.write_str("construction vtable for ")?;
                self.whole(*of)?;
                self.text.write_str("-in-")?;
                self.whole(*within)
            }
            Node::Qualified(of, qualifiers) => {
                // A template argument may carry the qualifier already.
                let (of, qualifiers) = match self.resolved(*of) {
                    Node::Qualified(inner, own) => (*inner, own | qualifiers),
                    _ => (*of, *qualifiers),
                };
                self.left(of)?;
                self.qualifiers(qualifiers)
            }
            Node::Pointer(to, mark) => {
                let (to, mark) = self.collapsed(*to, mark)?;
                self.left(to)?;
                let wrapped = self.is_wrapped(to)?;
                self.text.write_str(wrapped.unwrap_or(""))?;
                self.text.write_str(mark)
            }
            Node::Member(class, of) => {
                self.left(*of)?;
                let wrapped = self.is_wrapped(*of)?;
                self.text.write_str(wrapped.unwrap_or(" "))?;
                self.whole(*class)?;
                self.text.write_str("::*")
            }
            Node::FunctionType { returns, .. } => {
                self.left(*returns)?;
                if self.has_right(*returns)? { Ok(()) } else { self.text.write_str(" ") }
            }
            Node::Array(_, of) => self.left(*of),
            Node::Vector(count, of) => {
                self.whole(*of)?;
                write!(self.text, " __vector({count})")
            }
            Node::Followed(of, by) => {
                self.left(*of)?;
                write!(self.text, " {by}")
            }
            Node::Pack(all) => self.list(all),
            Node::Expansion(of) => self.expansion(*of),
            Node::Literal(of, value) => self.literal(*of, value),
            Node::Argument(number) => write!(self.text, "T{number}"),
            Node::Auto(number) => write!(self.text, "auto:{}", number + 1),
        }
    }

    fn right(&mut self, id: Id) -> Result {
        self.visit(id, |printer, node| match node {
            Node::Pointer(to, mark) => {
                let (to, _) = printer.collapsed(*to, mark)?;
                if printer.is_wrapped(to)?.is_some() {
                    printer.text.write_str(")")?;
                }
                printer.right(to)
            }
            Node::Member(_, of) => {
                if printer.is_wrapped(*of)?.is_some() {
                    printer.text.write_str(")")?;
                }
                printer.right(*of)
            }
            Node::FunctionType { returns, parameters, qualifiers } => {
                printer.parameters(parameters)?;
                printer.qualifiers(*qualifiers)?;
                printer.right(*returns)
            }
            Node::Array(bound, of) => {
                write!(printer.text, "{}[{bound}]", if printer.text.last() == Some(b']') { "" } else { " " })?;
                printer.right(*of)
            }
            Node::Qualified(of, _) | Node::Followed(of, _) => printer.right(*of),
            _ => Ok(()),
        })
    }

    /// Collapses a reference to a reference, which results from a template argument.
    fn collapsed(
        &mut self,
        mut to: Id,
        mut mark: &'static str,
    ) -> std::result::Result<(Id, &'static str), std::fmt::Error> {
        while mark != "*" {
            self.step()?;
            match self.resolved(to) {
                Node::Pointer(inner, of) if *of != "*" => {
                    (to, mark) = (*inner, if *of == "&" || mark == "&" { "&" } else { "&&" });
                }
                _ => break,
            }
        }
        Ok((to, mark))
    }

    fn literal(&mut self, of: Id, value: &str) -> Result {
        let (sign, digits) = value.strip_prefix('n').map_or(("", value), |digits| ("-", digits));
        let suffix = match self.resolved(of) {
            Node::Text("bool") if digits == "0" => return self.text.write_str("false"),
            Node::Text("bool") if digits == "1" => return self.text.write_str("true"),
            Node::Text("int") => "",
            Node::Text("unsigned int") => "u",
            Node::Text("long") => "l",
            Node::Text("unsigned long") => "ul",
            Node::Text("long long") => "ll",
            Node::Text("unsigned long long") => "ull",
            Node::Text("decltype(nullptr)") => return self.text.write_str("nullptr"),
            _ => {
                self.text.write_str("(")?;
                self.whole(of)?;
                return write!(self.text, "){sign}{digits}");
            }
        };
        write!(self.text, "{sign}{digits}{suffix}")
    }

    /// Prints a pattern once for each element of its pack.
    fn expansion(&mut self, of: Id) -> Result {
        let before = self.element.take();
        let Some(count) = self.pack_in(of)? else {
            self.whole(of)?;
            self.element = before;
            return self.text.write_str("...");
        };
        let begin = self.text.len();
        for element in 0..count {
            if self.text.len() > begin {
                self.text.write_str(", ")?;
            }
            self.element = Some(element);
            self.whole(of)?;
        }
        self.element = before;
        Ok(())
    }

    /// Returns the number of elements of the first pack in a node.
    fn pack_in(&mut self, id: Id) -> std::result::Result<Option<usize>, std::fmt::Error> {
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            self.step()?;
            match self.node(id) {
                Node::Pack(all) => return Ok(Some(all.len())),
                Node::Scoped(one, other) | Node::Member(one, other) => left.extend([*other, *one]),
                Node::Template(name, all) => {
                    left.extend(all.iter().rev());
                    left.push(*name);
                }
                Node::FunctionType { returns, parameters, .. } => {
                    left.extend(parameters.iter().rev());
                    left.push(*returns);
                }
                Node::Qualified(of, _)
                | Node::Pointer(of, _)
                | Node::Array(_, of)
                | Node::Vector(_, of)
                | Node::Followed(of, _)
                | Node::Tagged(of, _) => left.push(*of),
                _ => {}
            }
        }
        Ok(None)
    }
}
