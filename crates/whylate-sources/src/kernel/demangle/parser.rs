// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses mangled C++ names (Itanium C++ ABI, section 5.1) without backtracking. Expressions are skipped.

mod expressions;
mod types;

use std::rc::Rc;

use self::expressions::OPERATORS;

/// The index of a node.
pub(super) type Id = u32;
/// A list of nodes, which several nodes share.
pub(super) type List = Rc<[Id]>;

/// Qualifiers of a type or a member function: `const`, `volatile`, `restrict`, `&` and `&&`.
pub(super) const CONST: u8 = 1;
pub(super) const VOLATILE: u8 = 2;
pub(super) const RESTRICT: u8 = 4;
pub(super) const LVALUE: u8 = 8;
pub(super) const RVALUE: u8 = 16;

/// The maximum depth of nested productions. A template takes three levels.
const MAX_DEPTH: u32 = 400;

#[derive(Clone, Debug)]
pub(super) enum Node<'a> {
    Text(&'a str),
    /// An abbreviation such as `std::string`, and the name of its constructor.
    Standard(&'static str, &'static str),
    Scoped(Id, Id),
    Template(Id, List),
    Constructor(Id),
    Destructor(Id),
    Conversion(Id),
    LiteralOperator(Id),
    Lambda(List, u32),
    Unnamed(u32),
    Tagged(Id, &'a str),
    Function {
        name: Id,
        returns: Option<Id>,
        parameters: List,
        qualifiers: u8,
    },
    Special(&'static str, Id),
    ConstructionTable(Id, Id),
    Qualified(Id, u8),
    Pointer(Id, &'static str),
    Member(Id, Id),
    FunctionType {
        returns: Id,
        parameters: List,
        qualifiers: u8,
    },
    Array(&'a str, Id),
    Vector(&'a str, Id),
    /// A type followed by a word.
    Followed(Id, &'a str),
    Pack(List),
    Expansion(Id),
    Literal(Id, &'a str),
    /// A template argument by its index, used before the arguments are known.
    Argument(usize),
    /// A parameter of a generic lambda by its index.
    Auto(usize),
}

pub(super) struct Nodes<'a> {
    pub(super) all: Vec<Node<'a>>,
    /// The template arguments that [`Node::Argument`] refers to.
    pub(super) arguments: List,
}

/// Returns the nodes, the root, and the suffix that compilers add to clones. `None` for invalid names and unsupported
/// productions.
pub(super) fn parse(mangled: &str) -> Option<(Nodes<'_>, Id, &str)> {
    let mut parser = Parser {
        text: mangled,
        at: 0,
        nodes: Vec::new(),
        substitutions: Vec::new(),
        arguments: None,
        in_lambda: 0,
        has_forward: false,
        forward: Rc::default(),
        depth: 0,
    };
    let whole = parser.encoding()?;
    let suffix = &mangled[parser.at..];
    let is_copy = suffix.is_empty() || suffix.starts_with('.');
    // A forward reference needs template arguments that follow.
    let is_known = !parser.has_forward || !parser.forward.is_empty();
    (is_copy && is_known).then_some((Nodes { all: parser.nodes, arguments: parser.forward }, whole, suffix))
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    nodes: Vec<Node<'a>>,
    substitutions: Vec<Id>,
    /// The template arguments of the function to which the current types belong.
    arguments: Option<List>,
    /// The number of lambdas that enclose the current type.
    in_lambda: u32,
    has_forward: bool,
    forward: List,
    depth: u32,
}

/// A parsed name.
struct Name {
    id: Id,
    /// The template arguments of the last component.
    arguments: Option<List>,
    /// Whether a template function of this name has its return type mangled.
    may_return: bool,
    qualifiers: u8,
}

type Read<T> = Option<T>;

impl<'a> Parser<'a> {
    fn peek(&self) -> u8 {
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    fn second(&self) -> u8 {
        self.text.as_bytes().get(self.at + 1).copied().unwrap_or(0)
    }

    fn begins(&self, begins: &str) -> bool {
        self.text.as_bytes()[self.at..].starts_with(begins.as_bytes())
    }

    fn take(&mut self, begins: &str) -> bool {
        let is_there = self.begins(begins);
        self.at += if is_there { begins.len() } else { 0 };
        is_there
    }

    fn expect(&mut self, begins: &str) -> Read<()> {
        self.take(begins).then_some(())
    }

    fn add(&mut self, node: Node<'a>) -> Id {
        self.nodes.push(node);
        (self.nodes.len() - 1) as Id
    }

    fn substitute(&mut self, id: Id) -> Id {
        self.substitutions.push(id);
        id
    }

    /// Parses a production one level deeper.
    fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Read<T>) -> Read<T> {
        self.depth += 1;
        let read = if self.depth <= MAX_DEPTH { read(self) } else { None };
        self.depth -= 1;
        read
    }

    fn until_end(&mut self, mut read: impl FnMut(&mut Self) -> Read<Id>) -> Read<List> {
        let mut all = Vec::new();
        while !self.take("E") {
            all.push(read(self)?);
        }
        Some(all.into())
    }

    fn digits(&mut self) -> &'a str {
        let begins = self.at;
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
        &self.text[begins..self.at]
    }

    /// Parses a sequence number: `_` is 0, `0_` is 1.
    fn counted(&mut self) -> Read<usize> {
        let digits = self.digits();
        self.expect("_")?;
        if digits.is_empty() { Some(0) } else { digits.parse::<usize>().ok()?.checked_add(1) }
    }

    fn source_name(&mut self) -> Read<&'a str> {
        let length: usize = self.digits().parse().ok()?;
        let end = self.at.checked_add(length)?;
        let name = self.text.get(self.at..end).filter(|name| !name.is_empty())?;
        self.at = end;
        let is_anonymous = name.strip_prefix("_GLOBAL_").is_some_and(|rest| rest[1.min(rest.len())..].starts_with('N'));
        Some(if is_anonymous { "(anonymous namespace)" } else { name })
    }

    fn encoding(&mut self) -> Read<Id> {
        self.nested(|parser| match parser.peek() {
            b'T' | b'G' => parser.special(),
            _ => {
                let name = parser.name()?;
                if name.arguments.is_some() {
                    parser.arguments.clone_from(&name.arguments);
                }
                if parser.is_over() {
                    return Some(name.id);
                }
                let has_type = name.arguments.is_some() && name.may_return;
                if parser.has_forward && parser.forward.is_empty() {
                    parser.forward = name.arguments.clone()?;
                }
                let returns = if has_type { Some(parser.a_type()?) } else { None };
                let mut parameters = Vec::new();
                while !parser.is_over() {
                    parameters.push(parser.a_type()?);
                }
                if parameters.is_empty() {
                    return None;
                }
                let parameters = parser.without_void(&parameters);
                Some(parser.add(Node::Function { name: name.id, returns, parameters, qualifiers: name.qualifiers }))
            }
        })
    }

    fn is_over(&self) -> bool {
        matches!(self.peek(), 0 | b'E' | b'.')
    }

    fn without_void(&self, parameters: &[Id]) -> List {
        match parameters {
            [only] if matches!(self.nodes[*only as usize], Node::Text("void")) => Rc::default(),
            _ => parameters.into(),
        }
    }

    fn special(&mut self) -> Read<Id> {
        const OF_TYPES: [(&str, &str); 4] =
            [("TV", "vtable for "), ("TT", "VTT for "), ("TI", "typeinfo for "), ("TS", "typeinfo name for ")];
        for (begins, what) in OF_TYPES {
            if self.take(begins) {
                let of = self.a_type()?;
                return Some(self.add(Node::Special(what, of)));
            }
        }
        const OF_NAMES: [(&str, &str); 3] =
            [("GV", "guard variable for "), ("TW", "TLS wrapper function for "), ("TH", "TLS init function for ")];
        for (begins, what) in OF_NAMES {
            if self.take(begins) {
                let of = self.name()?.id;
                return Some(self.add(Node::Special(what, of)));
            }
        }
        let what = if self.take("Tc") {
            self.offset()?;
            self.offset()?;
            "covariant return thunk to "
        } else if self.begins("Th") {
            self.at += 1;
            self.offset()?;
            "non-virtual thunk to "
        } else if self.begins("Tv") {
            self.at += 1;
            self.offset()?;
            "virtual thunk to "
        } else if self.take("GTt") {
            "transaction clone for "
        } else if self.take("GR") {
            let of = self.name()?.id;
            while self.peek().is_ascii_alphanumeric() {
                self.at += 1;
            }
            self.expect("_")?;
            return Some(self.add(Node::Special("reference temporary for ", of)));
        } else {
            self.expect("TC")?;
            let of = self.a_type()?;
            self.counted()?;
            let within = self.a_type()?;
            return Some(self.add(Node::ConstructionTable(of, within)));
        };
        let of = self.encoding()?;
        Some(self.add(Node::Special(what, of)))
    }

    /// Parses the call offset of a thunk.
    fn offset(&mut self) -> Read<()> {
        let is_virtual = self.take("v");
        if !is_virtual {
            self.expect("h")?;
        }
        for _ in 0..1 + usize::from(is_virtual) {
            self.take("n");
            if self.digits().is_empty() {
                return None;
            }
            self.expect("_")?;
        }
        Some(())
    }

    fn name(&mut self) -> Read<Name> {
        self.nested(|parser| match parser.peek() {
            b'N' => parser.nested_name(),
            b'Z' => parser.local_name(),
            b'S' if parser.second() != b't' => {
                let id = parser.substitution()?;
                parser.with_arguments(id, true)
            }
            _ => {
                let is_standard = parser.take("St");
                let (mut id, may_return) = parser.unqualified(None)?;
                if is_standard {
                    let standard = parser.add(Node::Text("std"));
                    id = parser.add(Node::Scoped(standard, id));
                }
                if parser.peek() == b'I' {
                    parser.substitute(id);
                }
                parser.with_arguments(id, may_return)
            }
        })
    }

    fn with_arguments(&mut self, id: Id, may_return: bool) -> Read<Name> {
        if self.peek() != b'I' {
            return Some(Name { id, arguments: None, may_return, qualifiers: 0 });
        }
        let arguments = self.template_arguments()?;
        let id = self.add(Node::Template(id, arguments.clone()));
        Some(Name { id, arguments: Some(arguments), may_return, qualifiers: 0 })
    }

    fn qualifiers(&mut self) -> u8 {
        let mut qualifiers = 0;
        for (begins, qualifier) in [("r", RESTRICT), ("V", VOLATILE), ("K", CONST)] {
            qualifiers |= if self.take(begins) { qualifier } else { 0 };
        }
        qualifiers
    }

    fn reference(&mut self) -> u8 {
        match (self.take("R"), self.peek()) {
            (true, _) => LVALUE,
            (false, b'O') => {
                self.at += 1;
                RVALUE
            }
            _ => 0,
        }
    }

    fn nested_name(&mut self) -> Read<Name> {
        self.expect("N")?;
        let has_object = self.take("H");
        let mut qualifiers = self.qualifiers();
        if !has_object {
            qualifiers |= self.reference();
        }
        let (mut whole, mut arguments, mut may_return): (Option<Id>, Option<List>, bool) = (None, None, true);
        while !self.take("E") {
            let id = match (self.peek(), whole) {
                (b'I', Some(of)) if arguments.is_none() => {
                    let read = self.template_arguments()?;
                    let id = self.add(Node::Template(of, read.clone()));
                    arguments = Some(read);
                    whole = Some(self.substitute(id));
                    continue;
                }
                (b'T', None) => {
                    let id = self.template_parameter()?;
                    self.substitute(id)
                }
                (b'D', None) if matches!(self.second(), b't' | b'T') => {
                    let id = self.decltype()?;
                    self.substitute(id)
                }
                (b'S', None) if self.second() == b't' => {
                    self.at += 2;
                    self.add(Node::Text("std"))
                }
                (b'S', None) => self.substitution()?,
                // The data member prefix of a lambda in an initializer.
                (b'M', Some(_)) => {
                    self.at += 1;
                    continue;
                }
                (_, scope) => {
                    let (mut id, returns) = self.unqualified(scope)?;
                    may_return = returns;
                    if let Some(scope) = scope {
                        id = self.add(Node::Scoped(scope, id));
                    }
                    self.substitute(id)
                }
            };
            arguments = None;
            whole = Some(id);
        }
        // The complete name is a substitution candidate only as a type.
        self.substitutions.pop();
        Some(Name { id: whole?, arguments, may_return, qualifiers })
    }

    fn local_name(&mut self) -> Read<Name> {
        self.expect("Z")?;
        let function = self.encoding()?;
        self.expect("E")?;
        let (inner, name) = if self.take("s") {
            (self.add(Node::Text("string literal")), None)
        } else {
            if self.take("d") {
                self.take("n");
                self.counted()?;
            }
            let name = self.name()?;
            (name.id, Some(name))
        };
        self.discriminator();
        let id = self.add(Node::Scoped(function, inner));
        Some(match name {
            Some(name) => Name { id, ..name },
            None => Name { id, arguments: None, may_return: false, qualifiers: 0 },
        })
    }

    fn discriminator(&mut self) {
        let begins = self.at;
        if self.take("__") {
            if !self.digits().is_empty() && self.take("_") {
                return;
            }
        } else if self.take("_") && self.peek().is_ascii_digit() {
            self.at += 1;
            return;
        }
        self.at = begins;
    }

    /// Parses an unqualified name, and returns whether a template function of this name has its return type mangled.
    fn unqualified(&mut self, scope: Option<Id>) -> Read<(Id, bool)> {
        // Internal linkage.
        self.take("L");
        let (mut id, mut returns) = match self.peek() {
            b'0'..=b'9' => {
                let name = self.source_name()?;
                (self.add(Node::Text(name)), true)
            }
            b'U' if self.second() == b'l' => {
                self.at += 2;
                self.in_lambda += 1;
                let parameters = self.until_end(Self::a_type);
                self.in_lambda -= 1;
                let parameters = self.without_void(&parameters?);
                let number = u32::try_from(self.counted()?.saturating_add(1)).ok()?;
                (self.add(Node::Lambda(parameters, number)), true)
            }
            b'U' if self.second() == b't' => {
                self.at += 2;
                let number = u32::try_from(self.counted()?.saturating_add(1)).ok()?;
                (self.add(Node::Unnamed(number)), true)
            }
            b'C' if scope.is_some() => {
                self.at += 1;
                let is_inherited = self.take("I");
                if !matches!(self.peek(), b'1'..=b'5') {
                    return None;
                }
                self.at += 1;
                if is_inherited {
                    self.a_type()?;
                }
                (self.add(Node::Constructor(scope?)), false)
            }
            b'D' if scope.is_some() && matches!(self.second(), b'0'..=b'5') => {
                self.at += 2;
                (self.add(Node::Destructor(scope?)), false)
            }
            _ => self.operator_name()?,
        };
        while self.take("B") {
            let tag = self.source_name()?;
            id = self.add(Node::Tagged(id, tag));
            returns &= true;
        }
        Some((id, returns))
    }

    fn operator_name(&mut self) -> Read<(Id, bool)> {
        if self.take("cv") {
            let before = self.arguments.take();
            let to = self.a_type();
            self.arguments = before;
            let to = to?;
            return Some((self.add(Node::Conversion(to)), false));
        }
        if self.take("li") {
            let name = self.source_name()?;
            let name = self.add(Node::Text(name));
            return Some((self.add(Node::LiteralOperator(name)), true));
        }
        let (_, name, _) = *self.operator()?;
        Some((self.add(Node::Text(name)), true))
    }

    /// Parses an operator code.
    fn operator(&mut self) -> Read<&'static (&'static str, &'static str, u8)> {
        let code = self.text.get(self.at..self.at + 2)?;
        let operator = OPERATORS.iter().find(|(known, ..)| *known == code)?;
        self.at += 2;
        Some(operator)
    }

    fn substitution(&mut self) -> Read<Id> {
        self.expect("S")?;
        let standard = match self.peek() {
            b'a' => Some(("std::allocator", "allocator")),
            b'b' => Some(("std::basic_string", "basic_string")),
            b's' => Some(("std::string", "basic_string")),
            b'i' => Some(("std::istream", "basic_istream")),
            b'o' => Some(("std::ostream", "basic_ostream")),
            b'd' => Some(("std::iostream", "basic_iostream")),
            _ => None,
        };
        if let Some((whole, base)) = standard {
            self.at += 1;
            let mut id = self.add(Node::Standard(whole, base));
            while self.take("B") {
                let tag = self.source_name()?;
                id = self.add(Node::Tagged(id, tag));
                self.substitute(id);
            }
            return Some(id);
        }
        let begins = self.at;
        while matches!(self.peek(), b'0'..=b'9' | b'A'..=b'Z') {
            self.at += 1;
        }
        let digits = &self.text[begins..self.at];
        self.expect("_")?;
        let index = if digits.is_empty() { 0 } else { usize::from_str_radix(digits, 36).ok()?.checked_add(1)? };
        self.substitutions.get(index).copied()
    }

    fn template_parameter(&mut self) -> Read<Id> {
        self.expect("T")?;
        let number = self.counted()?;
        if self.in_lambda > 0 {
            return Some(self.add(Node::Auto(number)));
        }
        match &self.arguments {
            Some(arguments) => arguments.get(number).copied(),
            None => {
                self.has_forward = true;
                Some(self.add(Node::Argument(number)))
            }
        }
    }

    fn template_arguments(&mut self) -> Read<List> {
        self.expect("I")?;
        self.nested(|parser| parser.until_end(Self::template_argument))
    }

    fn template_argument(&mut self) -> Read<Id> {
        self.nested(|parser| match parser.peek() {
            b'L' => parser.literal(),
            b'X' => {
                parser.at += 1;
                parser.expression()?;
                parser.expect("E")?;
                Some(parser.add(Node::Text("(...)")))
            }
            // `I` is how old compilers mangle packs.
            b'J' | b'I' => {
                parser.at += 1;
                let of = parser.until_end(Self::template_argument)?;
                Some(parser.add(Node::Pack(of)))
            }
            _ => parser.a_type(),
        })
    }

    fn literal(&mut self) -> Read<Id> {
        self.expect("L")?;
        if self.take("_Z") || self.peek() == b'Z' && self.take("Z") {
            let before = self.arguments.take();
            let of = self.encoding();
            self.arguments = before;
            let of = of?;
            self.expect("E")?;
            return Some(of);
        }
        let of = self.a_type()?;
        let begins = self.at;
        while !matches!(self.peek(), b'E' | 0) {
            self.at += 1;
        }
        let value = self.text.get(begins..self.at)?;
        self.expect("E")?;
        Some(self.add(Node::Literal(of, value)))
    }
}
