// SPDX-License-Identifier: MIT OR Apache-2.0
//! Modules of a crate use each other in one direction: at no level do modules beside each other form a circle.
//!
//! Reads the sources as text: `use` declarations and paths, with names that a module passes on (`pub use`) followed to
//! the modules that declare them. A directory stands for all files in it. A module and its parent may use each other.
//! Tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// The names of a module from the crate's root: empty for the root.
type ModulePath = Vec<String>;

/// What a source file declares and names.
#[derive(Default)]
struct Module {
    children: BTreeSet<String>,
    /// Paths by the name under which `use` brings them in.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths that `use` brings in with `*`.
    globs: Vec<Vec<String>>,
    /// Paths in the code.
    paths: BTreeSet<Vec<String>>,
}

/// Splits Rust source into names, `::` and single characters, without comments and the contents of literals.
fn tokens(source: &str) -> Vec<String> {
    let chars: Vec<char> = source.chars().collect();
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let starts = |at: usize, text: &str| text.chars().enumerate().all(|(n, c)| chars.get(at + n) == Some(&c));
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        if starts(at, "//") {
            at += chars[at..].iter().take_while(|c| **c != '\n').count();
        } else if starts(at, "/*") {
            at += 2;
            while at < chars.len() && !starts(at, "*/") {
                at += 1;
            }
            at += 2;
        } else if c == '"' {
            // A raw literal has its `r` or `br` and its `#` as the tokens before it.
            let hashes = tokens.iter().rev().take_while(|token: &&String| *token == "#").count();
            let is_raw = tokens.iter().rev().nth(hashes).is_some_and(|token| token == "r" || token == "br");
            let end = format!("\"{}", "#".repeat(if is_raw { hashes } else { 0 }));
            at += 1;
            while at < chars.len() && !starts(at, &end) {
                at += if chars[at] == '\\' && !is_raw { 2 } else { 1 };
            }
            at += end.len();
            tokens.push("\"".to_owned());
        } else if c == '\'' {
            // A character, or else a lifetime.
            at += match (chars.get(at + 1), chars.get(at + 2)) {
                (Some('\\'), _) => 3 + chars[at + 3..].iter().take_while(|c| **c != '\'').count() + 1,
                (_, Some('\'')) => 3,
                _ => 1,
            };
        } else if is_name(c) {
            let name: String = chars[at..].iter().take_while(|c| is_name(**c)).collect();
            at += name.chars().count();
            tokens.push(name);
        } else if starts(at, "::") {
            tokens.push("::".to_owned());
            at += 2;
        } else {
            if !c.is_whitespace() {
                tokens.push(c.to_string());
            }
            at += 1;
        }
    }
    tokens
}

/// Returns how many tokens an item has: to its `;` or its closing brace.
fn item_len(tokens: &[String]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 && (token == ";" || token == "}") {
            return at + 1;
        }
    }
    tokens.len()
}

/// Reads the tree of one `use` declaration after `prefix`; returns how many tokens it has.
fn read_use(tokens: &[String], prefix: &[String], module: &mut Module) -> usize {
    let mut path = prefix.to_vec();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token.as_str() {
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at += read_use(&tokens[at..], &path, module);
                    at += usize::from(tokens.get(at).is_some_and(|token| token == ","));
                }
                return at + 1;
            }
            "*" => {
                module.globs.push(path);
                return at + 1;
            }
            "::" => at += 1,
            "as" => {
                module.imports.insert(tokens.get(at + 1).cloned().unwrap_or_default(), path);
                return at + 2;
            }
            "," | "}" | ";" => break,
            "self" if !path.is_empty() => at += 1,
            name => {
                path.push(name.to_owned());
                at += 1;
            }
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    module.imports.insert(name, path);
    at
}

/// Reads a source file.
fn parsed(source: &str) -> Module {
    let tokens = tokens(source);
    let mut module = Module::default();
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token == text);
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at..].iter().take(7).map(String::as_str).eq(["#", "[", "cfg", "(", "test", ")", "]"]) {
            at += 7;
            while is(at, "#") {
                at += 1 + tokens[at..].iter().take_while(|token| *token != "]").count();
            }
            at += item_len(&tokens[at..]);
        // `impl … + use<…>` brings nothing in.
        } else if is(at, "use") && !is(at + 1, "<") {
            at += 1 + read_use(&tokens[at + 1..], &[], &mut module);
        } else if is(at, "mod") && is(at + 2, ";") {
            module.children.insert(tokens[at + 1].clone());
            at += 3;
        } else if is(at + 1, "::") {
            let mut path = vec![tokens[at].clone()];
            while is(at + 1, "::") && tokens.get(at + 2).is_some_and(|name| name != "<" && name != "{") {
                path.push(tokens[at + 2].clone());
                at += 2;
            }
            module.paths.insert(path);
            at += 1;
        } else {
            at += 1;
        }
    }
    module
}

/// Reads the module `path` from `file`, and its children.
fn read_modules(
    file: &Path,
    directory: &Path,
    path: &[String],
    modules: &mut BTreeMap<ModulePath, Module>,
) -> Result<()> {
    let source = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let module = parsed(&source);
    for child in &module.children {
        let (beside, below) = (directory.join(format!("{child}.rs")), directory.join(child));
        let file = if beside.exists() { beside } else { below.join("mod.rs") };
        read_modules(&file, &below, &[path, std::slice::from_ref(child)].concat(), modules)?;
    }
    modules.insert(path.to_vec(), module);
    Ok(())
}

/// Finds the module that declares the item at `path`, as it is named in the module `from`; `None` if it is of another
/// crate. Follows at most `steps` imports.
fn declaring(
    modules: &BTreeMap<ModulePath, Module>,
    from: &[String],
    path: &[String],
    steps: u32,
) -> Option<ModulePath> {
    let mut at = from.to_vec();
    let mut is_relative = false;
    for (n, name) in path.iter().enumerate() {
        let module = modules.get(&at)?;
        match name.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            name if module.children.contains(name) => at.push(name.to_owned()),
            name => {
                let rest = &path[n + 1..];
                let steps = steps.checked_sub(1)?;
                let through = |target: &Vec<String>| declaring(modules, &at, &[target, rest].concat(), steps);
                // A name may be brought in twice: a module beside a macro.
                if let Some(target) = module.imports.get(name).filter(|target| target.len() > 1) {
                    return through(target);
                }
                let with_name = |glob: &Vec<String>| [glob.as_slice(), std::slice::from_ref(&path[n])].concat();
                if let Some(found) = module.globs.iter().find_map(|glob| through(&with_name(glob))) {
                    return Some(found);
                }
                return is_relative.then_some(at);
            }
        }
        is_relative = true;
    }
    Some(at)
}

/// What one module takes from another: an example.
type Arrows = BTreeMap<(String, String), String>;

/// Finds, for each level, which of the modules beside each other use which.
fn levels(modules: &BTreeMap<ModulePath, Module>) -> BTreeMap<ModulePath, Arrows> {
    let mut levels: BTreeMap<ModulePath, Arrows> = BTreeMap::new();
    for (from, module) in modules {
        for path in module.imports.values().chain(&module.globs).chain(&module.paths) {
            let Some(to) = declaring(modules, from, path, 8) else { continue };
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if let (Some(a), Some(b)) = (from.get(common), to.get(common)) {
                let example = format!("{} -> {}: {}", from.join("::"), to.join("::"), path.join("::"));
                let level = levels.entry(from[..common].to_vec()).or_default();
                level.entry((a.clone(), b.clone())).or_insert(example);
            }
        }
    }
    levels
}

/// Returns the arrows between modules that reach each other, and so are in a circle.
fn circles(arrows: &Arrows) -> Vec<&str> {
    let reaches = |from: &str, to: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(at) = next.pop() {
            for (_, end) in arrows.keys().filter(|(start, _)| start == at) {
                if seen.insert(end.as_str()) {
                    next.push(end);
                }
            }
        }
        seen.contains(to)
    };
    arrows.iter().filter(|((a, b), _)| reaches(b, a)).map(|(_, example)| example.as_str()).collect()
}

#[test]
fn modules_beside_each_other_form_no_circle() -> Result<()> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut found = String::new();
    for (name, root) in [("whylate-model", "lib.rs"), ("whylate-sources", "lib.rs"), ("whylate", "main.rs")] {
        let directory = crates.join(name).join("src");
        let mut modules = BTreeMap::new();
        read_modules(&directory.join(root), &directory, &[], &mut modules)?;
        ensure!(modules.len() > 50, "only {} modules of {name} are found", modules.len());
        for (level, arrows) in levels(&modules) {
            let circles = circles(&arrows);
            if !circles.is_empty() {
                found += &format!("{name} {}\n    {}\n", level.join("::"), circles.join("\n    "));
            }
        }
    }
    ensure!(found.is_empty(), "modules use each other in a circle:\n{found}");
    Ok(())
}

/// Reads the Rust files below a directory, by their paths from `crates`.
fn read_files(crates: &Path, below: &Path, files: &mut BTreeMap<String, Module>) -> Result<()> {
    for entry in fs::read_dir(below).with_context(|| format!("cannot read {}", below.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            read_files(crates, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(crates)?.display().to_string();
            files.insert(name, parsed(&fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// Returns the cell of a row of ARCHITECTURE.md's table of what to touch.
fn touched(what: &str) -> Result<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../ARCHITECTURE.md"))?;
    let row = text.lines().find_map(|line| line.strip_prefix(&format!("| {what} | ")));
    row.map(str::to_owned).with_context(|| format!("no row of {what}"))
}

#[test]
fn adding_a_source_touches_the_files_that_the_architecture_lists() -> Result<()> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let (mut files, mut places) = (BTreeMap::new(), None::<BTreeSet<&str>>);
    for name in ["whylate-model", "whylate-sources", "whylate"] {
        read_files(&crates, &crates.join(name).join("src"), &mut files)?;
    }
    let registry = files.get("whylate-model/src/sources/mod.rs").context("no registry of cards")?;
    let is_card = |path: &&Vec<String>| matches!(&path[..], [module, card] if *card == module.to_uppercase());
    let sources: Vec<&String> = registry.imports.values().filter(is_card).map(|path| &path[0]).collect();
    ensure!(sources.len() >= 6, "only the sources {sources:?} are found");
    for &source in &sources {
        let (card, variant) = (source.to_uppercase(), format!("{}{}", source[..1].to_uppercase(), &source[1..]));
        let names = |path: &Vec<String>| {
            path.iter().any(|name| name == source || *name == card || name.strip_prefix(&variant) == Some("Options"))
        };
        let names_source = |(file, module): &(&String, &Module)| {
            let is_own = file.split(['/', '.']).any(|part| part == source);
            let paths = module.imports.values().chain(&module.globs).chain(&module.paths);
            !is_own && (module.children.contains(source) || paths.into_iter().any(names))
        };
        let found: BTreeSet<&str> = files.iter().filter(names_source).map(|(file, _)| file.as_str()).collect();
        places = Some(places.map_or(found.clone(), |all| all.intersection(&found).copied().collect()));
    }
    // Each source has a check, but need not: that is a row of its own.
    let mut places = places.context("no sources")?;
    ensure!(places.remove("whylate/src/cli/selftest.rs"), "no source has a check: {places:?}");
    let row = touched("a source")?;
    let listed = ["sources/mod.rs", "lib.rs", "cli/parser.rs", "cli/mod.rs", "render/text/mod.rs"];
    let is_listed = |place: &&str| listed.iter().any(|end| place.ends_with(end) && row.contains(&format!("`{end}`")));
    let unlisted: Vec<&str> = places.iter().copied().filter(|place| !is_listed(place)).collect();
    ensure!(unlisted.is_empty() && places.len() == listed.len(), "every source is named in {places:?}");
    Ok(())
}

#[test]
fn adding_a_sink_touches_the_two_files_that_the_architecture_lists() -> Result<()> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    ensure!(touched("a sink")?.contains("lines in two files"), "ARCHITECTURE.md counts the files of a sink otherwise");
    let mut files = BTreeMap::new();
    read_files(&crates, &crates.join("whylate/src"), &mut files)?;
    let is_trait = |path: &Vec<String>| path.ends_with(&["ticks".to_owned(), "Sink".to_owned()]);
    let mut sinks = 0;
    for file in files.iter().filter(|(_, module)| module.imports.values().any(is_trait)).map(|(file, _)| file) {
        let text = fs::read_to_string(crates.join(file))?;
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (_, of) in
            code.lines().filter(|line| line.starts_with("impl")).filter_map(|line| line.split_once("Sink for "))
        {
            let name = of.split(['<', ' ']).next().unwrap_or_default();
            // No other file can name the sink, so what is left is to declare the module and to call it.
            let is_private = code.lines().any(|line| line.starts_with(&format!("struct {name}")));
            ensure!(is_private && code.contains("drive("), "{file} does not keep the sink {name} for itself");
            sinks += 1;
        }
    }
    ensure!(sinks > 8, "only {sinks} sinks are found");
    Ok(())
}

#[test]
fn circle_is_found_through_names_passed_on() {
    let sources = [
        ("", "mod a; mod b; mod c;\npub use a::First;\n#[cfg(test)]\nmod tests { use crate::c::Third; }"),
        ("a", "use crate::b;\n// use crate::c::Third;\npub struct First;\nfn f() { b::second(\"crate::c\", '\"'); }"),
        ("b", "use crate::{First, c::Third};"),
        ("c", "pub struct Third;"),
    ];
    let path =
        |name: &str| -> ModulePath { name.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect() };
    let modules = sources.map(|(name, source)| (path(name), parsed(source))).into();
    let levels = levels(&modules);
    let arrows = levels.values().next().expect("a level");
    assert_eq!(circles(arrows), ["a -> b: crate::b", "b -> a: crate::First"]);
    assert!(arrows.contains_key(&("b".to_owned(), "c".to_owned())));
}
