// SPDX-License-Identifier: MIT OR Apache-2.0
//! Validates JSON by the part of JSON Schema 2020-12 that `schemars` writes. Stricter than the standard: a field that the
//! schema does not name is an error.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Keywords without a constraint.
const ANNOTATIONS: [&str; 8] = ["$schema", "$defs", "$id", "title", "description", "format", "default", "examples"];

/// Checks a value by a definition of the schema.
///
/// # Errors
/// Fails with the path of the first part that the schema does not allow.
pub fn check(root: &Value, definition: &str, value: &Value) -> Result<(), String> {
    let schema = &root["$defs"][definition];
    assert!(schema.is_object(), "the schema has no definition {definition}");
    whole(root, schema, value, definition)
}

/// Checks a value. Each of its fields must have a name in the schema.
fn whole(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let known = fields(root, schema, value, at)?;
    match value.as_object().and_then(|object| object.keys().find(|key| !known.contains(*key))) {
        Some(key) => Err(format!("{at}: the schema has no field {key}")),
        None => Ok(()),
    }
}

/// Checks a value, and returns which of its fields the schema names.
fn fields(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<BTreeSet<String>, String> {
    let mut known = BTreeSet::new();
    let Some(schema) = schema.as_object() else {
        return if schema == &Value::Bool(true) { Ok(known) } else { Err(format!("{at}: nothing is allowed here")) };
    };
    for (keyword, of) in schema {
        match keyword.as_str() {
            "$ref" => {
                let name = of.as_str().and_then(|text| text.strip_prefix("#/$defs/")).unwrap_or_default();
                known.extend(fields(root, &root["$defs"][name], value, at)?);
            }
            "type" => {
                let names = of.as_array().map_or_else(|| vec![of], |all| all.iter().collect());
                let is = names.iter().any(|name| has_type(value, name.as_str().unwrap_or_default()));
                ensure(is, || format!("{at}: {value} is no {of}"))?;
            }
            "const" => ensure(value == of, || format!("{at}: {value} is not {of}"))?,
            "enum" => {
                let is = of.as_array().is_some_and(|all| all.contains(value));
                ensure(is, || format!("{at}: {value} is none of {of}"))?;
            }
            "minimum" => ensure(value.as_f64() >= of.as_f64(), || format!("{at}: {value} is below {of}"))?,
            "maximum" => ensure(value.as_f64() <= of.as_f64(), || format!("{at}: {value} is above {of}"))?,
            "anyOf" | "oneOf" => {
                let choices = of.as_array().into_iter().flatten();
                let checked: Vec<_> = choices.map(|choice| fields(root, choice, value, at)).collect();
                let why = || checked.iter().filter_map(|of| of.as_ref().err()).cloned().collect::<Vec<_>>().join("; ");
                let fit: Vec<_> = checked.iter().flatten().collect();
                let is_right = if keyword == "oneOf" { fit.len() == 1 } else { !fit.is_empty() };
                ensure(is_right, || format!("{at}: {} of {keyword} fit: {}", fit.len(), why()))?;
                known.extend(fit.into_iter().flatten().cloned());
            }
            "allOf" => {
                for part in of.as_array().into_iter().flatten() {
                    known.extend(fields(root, part, value, at)?);
                }
            }
            "required" => {
                let missing = of
                    .as_array()
                    .into_iter()
                    .flatten()
                    .find(|name| value.get(name.as_str().unwrap_or_default()).is_none());
                ensure(missing.is_none(), || format!("{at}: {missing:?} is missing"))?;
            }
            "properties" => {
                for (name, of) in of.as_object().into_iter().flatten() {
                    if let Some(field) = value.get(name) {
                        whole(root, of, field, &format!("{at}.{name}"))?;
                        known.insert(name.clone());
                    }
                }
            }
            "additionalProperties" => {
                let named = schema.get("properties").and_then(Value::as_object);
                for (name, field) in value.as_object().unwrap_or(&Map::new()) {
                    if named.is_none_or(|named| !named.contains_key(name)) {
                        whole(root, of, field, &format!("{at}.{name}"))?;
                        known.insert(name.clone());
                    }
                }
            }
            "items" if schema.contains_key("prefixItems") => {}
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    whole(root, of, item, &format!("{at}[{index}]"))?;
                }
            }
            "prefixItems" => {
                let items = value.as_array().into_iter().flatten();
                for (index, (of, item)) in of.as_array().into_iter().flatten().zip(items).enumerate() {
                    whole(root, of, item, &format!("{at}[{index}]"))?;
                }
            }
            "minItems" | "maxItems" => {
                let (count, limit) = (value.as_array().map_or(0, Vec::len) as u64, of.as_u64().unwrap_or(0));
                let is = if keyword == "minItems" { count >= limit } else { count <= limit };
                ensure(is, || format!("{at}: {count} items"))?;
            }
            keyword if ANNOTATIONS.contains(&keyword) => {}
            keyword => return Err(format!("{at}: the validator does not know the keyword {keyword}")),
        }
    }
    Ok(known)
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

fn ensure(is_right: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if is_right { Ok(()) } else { Err(why()) }
}
