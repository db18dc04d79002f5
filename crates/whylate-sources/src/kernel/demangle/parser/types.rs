// SPDX-License-Identifier: MIT OR Apache-2.0
//! Types in mangled names.

use super::{Id, Node, Parser, Read};

impl<'a> Parser<'a> {
    pub(super) fn decltype(&mut self) -> Read<Id> {
        self.at += 2;
        self.expression()?;
        self.expect("E")?;
        Some(self.add(Node::Text("decltype(...)")))
    }

    pub(super) fn a_type(&mut self) -> Read<Id> {
        self.nested(Self::some_type)
    }

    pub(super) fn some_type(&mut self) -> Read<Id> {
        if let Some(name) = builtin(self.peek()) {
            self.at += 1;
            return Some(self.add(Node::Text(name)));
        }
        let id = match (self.peek(), self.second()) {
            (b'r' | b'V' | b'K', _) => {
                let qualifiers = self.qualifiers();
                if self.is_function() {
                    self.function_type(qualifiers)?
                } else {
                    let of = self.a_type()?;
                    self.add(Node::Qualified(of, qualifiers))
                }
            }
            (b'u', _) => {
                self.at += 1;
                let name = self.source_name()?;
                self.add(Node::Text(name))
            }
            (b'P', _) => self.pointer("*")?,
            (b'R', _) => self.pointer("&")?,
            (b'O', _) => self.pointer("&&")?,
            (b'C', _) => self.followed(" complex")?,
            (b'G', _) => self.followed(" imaginary")?,
            _ if self.is_function() => self.function_type(0)?,
            (b'A', _) => self.array()?,
            (b'M', _) => {
                self.at += 1;
                let class = self.a_type()?;
                let of = self.a_type()?;
                self.add(Node::Member(class, of))
            }
            (b'T', b's' | b'u' | b'e') => {
                self.at += 2;
                self.name()?.id
            }
            (b'T', _) => {
                let id = self.template_parameter()?;
                if self.peek() != b'I' {
                    return Some(self.substitute(id));
                }
                self.substitute(id);
                self.with_arguments(id, false)?.id
            }
            (b'D', b'p') => {
                self.at += 2;
                let of = self.a_type()?;
                self.add(Node::Expansion(of))
            }
            (b'D', b't' | b'T') => self.decltype()?,
            (b'D', b'v') => self.vector()?,
            (b'D', _) => {
                let name = builtin_of_two(self.second())?;
                self.at += 2;
                return Some(self.add(Node::Text(name)));
            }
            (b'S', second) if second != b't' => {
                let id = self.substitution()?;
                if self.peek() != b'I' {
                    return Some(id);
                }
                self.with_arguments(id, false)?.id
            }
            (b'U', second) if second.is_ascii_digit() => {
                self.at += 1;
                let name = self.source_name()?;
                let of = self.a_type()?;
                self.add(Node::Followed(of, name))
            }
            _ => self.name()?.id,
        };
        Some(self.substitute(id))
    }

    pub(super) fn pointer(&mut self, mark: &'static str) -> Read<Id> {
        self.at += 1;
        let to = self.a_type()?;
        Some(self.add(Node::Pointer(to, mark)))
    }

    pub(super) fn followed(&mut self, by: &'static str) -> Read<Id> {
        self.at += 1;
        let of = self.a_type()?;
        Some(self.add(Node::Followed(of, by.trim_start())))
    }

    pub(super) fn is_function(&self) -> bool {
        matches!((self.peek(), self.second()), (b'F', _) | (b'D', b'o' | b'O' | b'w' | b'x'))
    }

    pub(super) fn function_type(&mut self, mut qualifiers: u8) -> Read<Id> {
        if self.take("DO") {
            self.expression()?;
            self.expect("E")?;
        } else if self.take("Dw") {
            self.until_end(Self::a_type)?;
        } else if !self.take("Do") {
            self.take("Dx");
        }
        self.expect("F")?;
        self.take("Y");
        let returns = self.a_type()?;
        let mut parameters = Vec::new();
        while !self.take("E") {
            if matches!((self.peek(), self.second()), (b'R' | b'O', b'E')) {
                qualifiers |= self.reference();
                continue;
            }
            parameters.push(self.a_type()?);
        }
        if parameters.is_empty() {
            return None;
        }
        let parameters = self.without_void(&parameters);
        Some(self.add(Node::FunctionType { returns, parameters, qualifiers }))
    }

    pub(super) fn array(&mut self) -> Read<Id> {
        self.expect("A")?;
        let bound = self.digits();
        let bound = if bound.is_empty() && self.peek() != b'_' {
            self.expression()?;
            "..."
        } else {
            bound
        };
        self.expect("_")?;
        let of = self.a_type()?;
        Some(self.add(Node::Array(bound, of)))
    }

    pub(super) fn vector(&mut self) -> Read<Id> {
        self.at += 2;
        let count = self.digits();
        let count = if count.is_empty() {
            self.expect("_")?;
            self.expression()?;
            "..."
        } else {
            count
        };
        self.expect("_")?;
        let of = self.a_type()?;
        Some(self.add(Node::Vector(count, of)))
    }
}

fn builtin(code: u8) -> Option<&'static str> {
    Some(match code {
        b'v' => "void",
        b'w' => "wchar_t",
        b'b' => "bool",
        b'c' => "char",
        b'a' => "signed char",
        b'h' => "unsigned char",
        b's' => "short",
        b't' => "unsigned short",
        b'i' => "int",
        b'j' => "unsigned int",
        b'l' => "long",
        b'm' => "unsigned long",
        b'x' => "long long",
        b'y' => "unsigned long long",
        b'n' => "__int128",
        b'o' => "unsigned __int128",
        b'f' => "float",
        b'd' => "double",
        b'e' => "long double",
        b'g' => "__float128",
        b'z' => "...",
        _ => return None,
    })
}

/// Returns the builtin types that start with `D`.
fn builtin_of_two(code: u8) -> Option<&'static str> {
    Some(match code {
        b'a' => "auto",
        b'c' => "decltype(auto)",
        b'd' => "decimal64",
        b'e' => "decimal128",
        b'f' => "decimal32",
        b'h' => "half",
        b'i' => "char32_t",
        b'n' => "decltype(nullptr)",
        b's' => "char16_t",
        b'u' => "char8_t",
        _ => return None,
    })
}
