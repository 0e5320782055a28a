//! Settings of one run: `--set KEY=VALUE`, the strongest of the layers that [`super::compile`] lists.
//!
//! | argument | sets |
//! |---|---|
//! | `mode=max-autotune` | a key of `[compile]`, for every module |
//! | `options.epilogue_fusion=false` | one option |
//! | `encode.mode=default` | the same for the module `encode` only; stronger than the others |
//!
//! A value is TOML. Any other text that does not begin like a string, array or table is a string: `mode=max-autotune`
//! needs no quotes, which a shell would remove. The last of several values for one key counts. Errors look like those
//! of a spec, with one line for each argument.

use std::{borrow::Cow, collections::BTreeMap, ops::Range, path::Path};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    Overrides, Spec, SpecError, compile,
    error::Problem,
    parse,
    reader::{KeyValue, Reader, list, nearest},
};

/// The name of the text in problems.
const FLAG: &str = "--set";

/// The settings of this run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommandLine {
    all: Overrides,
    modules: BTreeMap<String, Overrides>,
}

impl CommandLine {
    /// Reads the arguments of `--set`, in their order. Every module that they name is one of `spec`.
    pub fn parse(arguments: &[String], spec: &Spec) -> Result<Self, SpecError> {
        let text = arguments.join("\n");
        let mut read = Vec::new();
        let mut problems = Vec::new();
        let mut start = 0;
        for argument in arguments {
            match Argument::read(&text, start..start + argument.len()) {
                Ok(argument) => read.push(argument),
                Err(problem) => problems.push(*problem),
            }
            start += argument.len() + 1;
        }
        let mut values = Vec::new();
        for argument in &read {
            match argument.value() {
                Ok(value) => values.push(value),
                Err(problem) => problems.push(argument.problem(&text, problem)),
            }
        }
        if !problems.is_empty() {
            problems.sort_by_key(|problem| (problem.line, problem.column));
            return Err(SpecError::Invalid(problems));
        }
        let mut reader = Reader::new(&text, Path::new(FLAG));
        let mut line = Self::default();
        for (argument, value) in read.iter().zip(&values) {
            argument.apply(&mut reader, value, spec, &mut line);
        }
        match reader.into_problems() {
            problems if problems.is_empty() => Ok(line),
            problems => Err(SpecError::Invalid(problems)),
        }
    }

    /// Returns the overrides for the module of this name.
    pub fn of(&self, module: &str) -> Overrides {
        let mut says = self.all.clone();
        if let Some(own) = self.modules.get(module) {
            says.merge(own);
        }
        says
    }

    /// Returns the settings for all modules.
    pub fn layers(&self) -> impl Iterator<Item = &Overrides> {
        std::iter::once(&self.all).chain(self.modules.values())
    }
}

/// One `KEY=VALUE`.
struct Argument<'t> {
    key: &'t str,
    /// Places of key and value in the whole text.
    place: Range<usize>,
    value_place: Range<usize>,
    value: &'t str,
    /// `k = VALUE` with the value at its place in the whole text, so that the places of its parts are right.
    document: String,
}

impl<'t> Argument<'t> {
    fn read(text: &'t str, place: Range<usize>) -> Result<Self, Box<Problem>> {
        let argument = &text[place.clone()];
        let Some((before, after)) = argument
            .split_once('=')
            .filter(|(key, _)| !key.trim().is_empty())
        else {
            let message = format!("`{argument}` is not KEY=VALUE");
            let help = "write `mode=max-autotune`, or `encode.mode=max-autotune` for one module";
            return Err(Box::new(Problem::new(
                FLAG.into(),
                text,
                place,
                message,
                help.to_owned(),
            )));
        };
        let inside = |part: &str, from: usize| {
            let start = from + part.len() - part.trim_start().len();
            start..start + part.trim().len()
        };
        let equals = place.start + before.len();
        Ok(Self {
            key: before.trim(),
            place: inside(before, place.start),
            value_place: inside(after, equals + 1),
            value: after.trim(),
            // A key has at least one byte, and so there is room for this one.
            document: format!("{:equals$}={after}", "k"),
        })
    }

    fn problem(&self, text: &str, error: toml::de::Error) -> Problem {
        let place = error.span().unwrap_or(self.value_place.clone());
        let message = format!("invalid TOML: {}", error.message());
        let help = "a value is TOML, as `true`, `[\"*\"]` or `\"max-autotune\"`".to_owned();
        Problem::new(FLAG.into(), text, place, message, help)
    }

    /// Returns the value and its place in the whole text.
    fn value(&self) -> Result<Spanned<DeValue<'_>>, toml::de::Error> {
        let begins_like_toml = self.value.starts_with(['"', '\'', '[', '{']);
        match DeTable::parse(&self.document).map(Spanned::into_inner) {
            Ok(mut table) if table.len() == 1 => {
                let value = table.remove("k");
                Ok(value.unwrap_or_else(|| self.bare()))
            }
            Err(error) if begins_like_toml => Err(error),
            _ => Ok(self.bare()),
        }
    }

    fn bare(&self) -> Spanned<DeValue<'_>> {
        let place = self.value_place.clone();
        Spanned::new(place, DeValue::String(Cow::Borrowed(self.value)))
    }

    fn apply<'r>(
        &self,
        reader: &mut Reader<'r>,
        value: &'r Spanned<DeValue<'r>>,
        spec: &Spec,
        line: &mut CommandLine,
    ) {
        let known = |key: &str| compile::KEYS.contains(&key.split('.').next().unwrap_or(key));
        let modules = spec.modules.iter().map(|module| module.name.as_str());
        // The longest name, as names have dots too.
        let module = modules
            .clone()
            .filter(|name| !known(self.key) && self.key.starts_with(&format!("{name}.")))
            .max_by_key(|name| name.len());
        let (layer, key) = match module {
            Some(module) => {
                let layer = line.modules.entry(module.to_owned()).or_default();
                (layer, &self.key[module.len() + 1..])
            }
            None => (&mut line.all, self.key),
        };
        let place = self.place.end - key.len()..self.place.end;
        let option = key.strip_prefix("options.");
        if option.is_none_or(str::is_empty) && !compile::KEYS.contains(&key) {
            let names: Vec<&str> = modules.collect();
            let help = match (nearest(key, compile::KEYS), key.split_once('.')) {
                (_, Some((name, _))) if !known(key) && module.is_none() => {
                    match nearest(name, &names) {
                        Some(near) => format!("did you mean the module `{near}`?"),
                        None => format!("modules: {}", list(&names)),
                    }
                }
                (Some(near), _) => format!("did you mean `{near}`?"),
                (None, _) => format!("known keys: {}", list(compile::KEYS)),
            };
            reader.wrong_help(&place, format!("unknown key `{key}` in {FLAG}"), help);
            return;
        }
        let field = KeyValue {
            name: format!("`{key}` in {FLAG}"),
            value: value.get_ref(),
            place: value.span(),
        };
        match option {
            Some(name) => {
                let mut options = compile::InductorOptions::new();
                parse::option(reader, &mut options, name, &place, &field);
                layer.options.get_or_insert_default().extend(options);
            }
            None => {
                let mut says = Overrides::default();
                parse::setting(reader, &mut says, key, &field);
                let paths: Vec<&str> = spec.modules.iter().map(|one| &*one.path).collect();
                parse::reaches(reader, key, &field, &paths);
                layer.merge(&says);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "schema = 1\n[model]\nname = \"m\"\nentry = \"m:f\"\n\
        [[module]]\nname = \"vision\"\n[[module]]\nname = \"vision.head\"\n[[module]]\nname = \"mode\"\n";

    fn parse(arguments: &[&str]) -> Result<CommandLine, SpecError> {
        let spec = Spec::parse(SPEC, Path::new("precast.toml")).unwrap();
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        CommandLine::parse(&arguments, &spec)
    }

    fn says(arguments: &[&str], module: &str) -> String {
        let line = parse(arguments).map_err(|error| error.render()).unwrap();
        serde_json::to_string(&line.of(module)).unwrap()
    }

    #[test]
    fn words_need_no_quotes_and_everything_else_is_toml() {
        for value in [
            "max-autotune",
            "\"max-autotune\"",
            "'max-autotune'",
            " max-autotune ",
        ] {
            let argument = format!("mode={value}");
            assert_eq!(says(&[&argument], "vision"), r#"{"mode":"max-autotune"}"#);
        }
        let arguments = [
            "smoketest_steps = 0x10",
            "passes=['p:a', \"p:b\"]",
            "dynamic={ seq = { min = 2, max = 512 } }",
            "options={ a = 1, triton = { cudagraphs = true } }",
            "options.b=[1, 'x']",
            "options.cpp.threads=4",
            "options.word=fast",
        ];
        insta::assert_snapshot!(says(&arguments, "vision"), @r#"{"dynamic":{"seq":{"min":2,"max":512}},"passes":["p:a","p:b"],"smoketest_steps":16,"options":{"a":1,"b":[1,"x"],"cpp.threads":4,"triton.cudagraphs":true,"word":"fast"}}"#);
    }

    #[test]
    fn one_module_is_stronger_than_all_and_the_last_is_stronger_than_the_first() {
        let arguments = [
            "vision.mode=reduce-overhead",
            "mode=default",
            "mode=max-autotune",
            "vision.head.enabled=false",
            "vision.options.a=1",
            "options.a=0",
            "options.b=0",
        ];
        insta::assert_snapshot!(says(&arguments, "vision"), @r#"{"mode":"reduce-overhead","options":{"a":1,"b":0}}"#);
        insta::assert_snapshot!(says(&arguments, "vision.head"), @r#"{"enabled":false,"mode":"max-autotune","options":{"a":0,"b":0}}"#);
        // A module that is called as a key of [compile] is: the key is meant.
        insta::assert_snapshot!(says(&arguments, "mode"), @r#"{"mode":"max-autotune","options":{"a":0,"b":0}}"#);
        assert_eq!(says(&[], "vision"), "{}");
    }

    #[test]
    fn a_caret_points_into_the_argument() {
        let brief = |arguments: &[&str]| {
            let error = parse(arguments).map(|_| ()).unwrap_err();
            crate::spec::tests::shorten(&error.render())
        };
        insta::assert_snapshot!(brief(&["mode=default", " vision . mode = fast"]), @"2:2+13 unknown key `vision . mode` in --set = did you mean the module `vision`?");
        insta::assert_snapshot!(brief(&["passes=['a:b', 'c']", "é=1", "options={", ""]), @r#"
        3:10+1 invalid TOML: unclosed inline table, expected `}` = a value is TOML, as `true`, `["*"]` or `"max-autotune"`
        4:1+1 `` is not KEY=VALUE = write `mode=max-autotune`, or `encode.mode=max-autotune` for one module
        "#);
        insta::assert_snapshot!(brief(&["third.mode=default", "vision.mdoe=default"]), @"
        1:1+10 unknown key `third.mode` in --set = modules: `vision`, `vision.head`, `mode`
        2:8+4 unknown key `mdoe` in --set = did you mean `mode`?
        ");
        insta::assert_snapshot!(brief(&["vision.head.passes=[1, 2]", "mode.mode=default", "dynamic=yes"]), @r"
        1:21+1 each item of `passes` in --set must be a string, not an integer = text stands in quotes
        2:1+9 unknown key `mode.mode` in --set = known keys: `enabled`, `backend`, `mode`, `dynamic`, `fullgraph`, `passes`, `allowlist`, `blocklist`, `healthcheck`, `smoketest_steps`, `fail_policy`, `options`
        3:9+3 `dynamic` in --set must be a boolean or a table = write true, false, or dimensions with their sizes: `{ seq = { min = 1, max = 512 } }`
        ");
    }
}
