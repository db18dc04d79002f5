// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expressions in mangled names, which are skipped, and operators.

use super::{Parser, Read};

impl Parser<'_> {
    /// Skips an expression. Types in it are substitution candidates.
    pub(super) fn expression(&mut self) -> Read<()> {
        self.nested(Self::some_expression)
    }

    pub(super) fn expressions_until(&mut self, end: &str) -> Read<()> {
        while !self.take(end) {
            self.expression()?;
        }
        Some(())
    }

    pub(super) fn some_expression(&mut self) -> Read<()> {
        self.take("gs");
        match (self.peek(), self.second()) {
            (b'L', _) => return self.literal().map(drop),
            (b'T', _) => return self.template_parameter().map(drop),
            (b'0'..=b'9', _) => return self.simple_id(),
            (b'f', b'p' | b'L') if self.is_function_parameter() => return self.function_parameter(),
            (b'f', b'l' | b'r' | b'L' | b'R') => {
                let has_start = matches!(self.second(), b'L' | b'R');
                self.at += 2;
                self.operator()?;
                self.expression()?;
                return if has_start { self.expression() } else { Some(()) };
            }
            _ => {}
        }
        let code = self.text.get(self.at..self.at + 2)?;
        self.at += 2;
        match code {
            "cl" | "cp" => {
                self.expression()?;
                self.expressions_until("E")
            }
            "il" => self.expressions_until("E"),
            "tl" => {
                self.a_type()?;
                self.expressions_until("E")
            }
            "cv" => {
                self.a_type()?;
                if self.take("_") { self.expressions_until("E") } else { self.expression() }
            }
            "nw" | "na" => {
                self.expressions_until("_")?;
                self.a_type()?;
                if self.take("E") {
                    return Some(());
                }
                if self.take("pi") { self.expressions_until("E") } else { self.expression() }
            }
            "dc" | "sc" | "cc" | "rc" => {
                self.a_type()?;
                self.expression()
            }
            "ti" | "st" | "at" => self.a_type().map(drop),
            "dl" | "da" | "te" | "sz" | "az" | "nx" | "sp" | "tw" => self.expression(),
            "tr" => Some(()),
            "dt" | "pt" => {
                self.expression()?;
                self.unresolved_name()
            }
            "sZ" => {
                if self.peek() == b'T' {
                    self.template_parameter().map(drop)
                } else {
                    self.function_parameter()
                }
            }
            "sP" => self.until_end(Self::template_argument).map(drop),
            "qu" => {
                self.expression()?;
                self.expression()?;
                self.expression()
            }
            "sr" | "on" | "dn" => {
                self.at -= 2;
                self.unresolved_name()
            }
            _ => {
                let (.., operands) = OPERATORS.iter().find(|(known, ..)| *known == code)?;
                // `pp_` and `mm_` are the prefix forms.
                if matches!(code, "pp" | "mm") {
                    self.take("_");
                }
                (0..*operands).try_for_each(|_| self.expression())
            }
        }
    }

    pub(super) fn is_function_parameter(&self) -> bool {
        self.second() == b'p' || self.text.as_bytes().get(self.at + 2).is_some_and(u8::is_ascii_digit)
    }

    pub(super) fn function_parameter(&mut self) -> Read<()> {
        if self.take("fpT") {
            return Some(());
        }
        if self.take("fL") {
            self.digits();
            self.expect("p")?;
        } else {
            self.expect("fp")?;
        }
        self.qualifiers();
        self.counted().map(drop)
    }

    pub(super) fn simple_id(&mut self) -> Read<()> {
        self.source_name()?;
        if self.peek() == b'I' { self.template_arguments().map(drop) } else { Some(()) }
    }

    pub(super) fn unresolved_name(&mut self) -> Read<()> {
        self.take("gs");
        if self.take("srN") {
            self.unresolved_type()?;
            while !self.take("E") {
                self.simple_id()?;
            }
        } else if self.take("sr") {
            if self.peek().is_ascii_digit() {
                while !self.take("E") {
                    self.simple_id()?;
                }
            } else {
                self.unresolved_type()?;
            }
        }
        if self.take("on") {
            self.operator_name()?;
        } else if self.take("dn") {
            return if self.peek().is_ascii_digit() { self.simple_id() } else { self.unresolved_type() };
        } else {
            return self.simple_id();
        }
        if self.peek() == b'I' { self.template_arguments().map(drop) } else { Some(()) }
    }

    pub(super) fn unresolved_type(&mut self) -> Read<()> {
        self.a_type().map(drop)
    }
}

/// Operators: code, name, and number of operands.
pub(super) const OPERATORS: [(&str, &str, u8); 52] = [
    ("nw", "operator new", 0),
    ("na", "operator new[]", 0),
    ("dl", "operator delete", 1),
    ("da", "operator delete[]", 1),
    ("aw", "operator co_await", 1),
    ("ps", "operator+", 1),
    ("ng", "operator-", 1),
    ("ad", "operator&", 1),
    ("de", "operator*", 1),
    ("co", "operator~", 1),
    ("pl", "operator+", 2),
    ("mi", "operator-", 2),
    ("ml", "operator*", 2),
    ("dv", "operator/", 2),
    ("rm", "operator%", 2),
    ("an", "operator&", 2),
    ("or", "operator|", 2),
    ("eo", "operator^", 2),
    ("aS", "operator=", 2),
    ("pL", "operator+=", 2),
    ("mI", "operator-=", 2),
    ("mL", "operator*=", 2),
    ("dV", "operator/=", 2),
    ("rM", "operator%=", 2),
    ("aN", "operator&=", 2),
    ("oR", "operator|=", 2),
    ("eO", "operator^=", 2),
    ("ls", "operator<<", 2),
    ("rs", "operator>>", 2),
    ("lS", "operator<<=", 2),
    ("rS", "operator>>=", 2),
    ("eq", "operator==", 2),
    ("ne", "operator!=", 2),
    ("lt", "operator<", 2),
    ("gt", "operator>", 2),
    ("le", "operator<=", 2),
    ("ge", "operator>=", 2),
    ("ss", "operator<=>", 2),
    ("nt", "operator!", 1),
    ("aa", "operator&&", 2),
    ("oo", "operator||", 2),
    ("pp", "operator++", 1),
    ("mm", "operator--", 1),
    ("cm", "operator,", 2),
    ("pm", "operator->*", 2),
    ("pt", "operator->", 2),
    ("cl", "operator()", 0),
    ("ix", "operator[]", 2),
    ("qu", "operator?", 3),
    ("ds", "operator.*", 2),
    ("sz", "sizeof", 1),
    ("az", "alignof", 1),
];
