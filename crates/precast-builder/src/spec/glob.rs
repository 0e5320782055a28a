//! Patterns over fully qualified names (FQNs), such as `encoder.layer.*`.
//!
//! | pattern part | matches |
//! |---|---|
//! | `layer` | the component `layer` |
//! | `*` | exactly one component with any name |
//! | `block_*` | one component that starts with `block_` |
//! | `**` | any number of components, also none |
//!
//! The model itself has the empty name, which has no components: `**` matches it and `*` does not. In an allowlist or
//! blocklist the single pattern `*` means everything, including the model itself: see [`listed`].

/// Returns whether `pattern` matches the whole of `fqn`.
pub fn matches(pattern: &str, fqn: &str) -> bool {
    wildcard(
        &parts(pattern),
        &parts(fqn),
        |p| *p == "**",
        |p, name| component(p, name),
    )
}

/// Returns whether one pattern of an allowlist or blocklist matches `fqn`; the lone `*` means everything.
pub fn listed(patterns: &[String], fqn: &str) -> bool {
    patterns
        .iter()
        .any(|pattern| pattern == "*" || matches(pattern, fqn))
}

/// Returns the defect of `pattern`, as the end of a sentence about it.
pub fn problem(pattern: &str) -> Option<String> {
    if pattern.is_empty() {
        return Some("is empty".to_owned());
    }
    for part in pattern.split('.') {
        if part.is_empty() {
            return Some("has an empty component".to_owned());
        }
        if part.contains("**") && part != "**" {
            return Some(format!("mixes `**` with other text in `{part}`"));
        }
        let strange = |c: &char| !(c.is_alphanumeric() || matches!(c, '_' | '*' | '-'));
        if let Some(c) = part.chars().find(strange) {
            return Some(format!("has the character `{}`", c.escape_debug()));
        }
    }
    None
}

fn parts(dotted: &str) -> Vec<&str> {
    match dotted {
        "" => Vec::new(),
        _ => dotted.split('.').collect(),
    }
}

fn component(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    wildcard(&pattern, &name, |c| *c == '*', |p, c| p == c)
}

/// Matches a sequence with wildcards for any number of items, in time proportional to the product of the lengths.
fn wildcard<P, T>(
    pattern: &[P],
    items: &[T],
    any: impl Fn(&P) -> bool,
    same: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut p, mut i) = (0, 0);
    // Where to continue if the latest wildcard must match one more item.
    let mut retry = None;
    while i < items.len() {
        if p < pattern.len() && any(&pattern[p]) {
            retry = Some((p, i));
            p += 1;
        } else if p < pattern.len() && same(&pattern[p], &items[i]) {
            p += 1;
            i += 1;
        } else if let Some((star, taken)) = retry {
            retry = Some((star, taken + 1));
            p = star + 1;
            i = taken + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_and_runs_of_them() {
        for (pattern, fqn, expected) in [
            ("encoder.layer.*", "encoder.layer.0", true),
            ("encoder.layer.*", "encoder.layer", false),
            ("encoder.layer.*", "encoder.layer.0.attention", false),
            ("encoder.**", "encoder", true),
            ("encoder.**", "encoder.layer.0", true),
            ("**.attention", "attention", true),
            ("**.attention", "encoder.layer.0.attention", true),
            ("**.layer.*.output", "a.layer.b.layer.3.output", true),
            ("**", "", true),
            ("*", "", false),
            ("*", "encoder", true),
            ("block_*", "block_12", true),
            ("b*k_*2", "block_12", true),
            ("block_*", "blocks", false),
            ("a.**.**.b", "a.b", true),
            ("a.*.b", "a.b", false),
        ] {
            assert_eq!(matches(pattern, fqn), expected, "{pattern} on {fqn}");
        }
    }

    #[test]
    fn the_lone_star_of_a_list_is_everything() {
        let list = |patterns: &[&str]| patterns.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(listed(&list(&["*"]), ""));
        assert!(listed(&list(&["*"]), "a.b.c"));
        assert!(!listed(&list(&["a.*"]), ""));
        assert!(!listed(&[], "a"));
    }

    #[test]
    fn many_wildcards_do_not_explode() {
        let pattern = "a*".repeat(40) + "b";
        assert!(!matches(&pattern, &"a".repeat(4000)));
        assert!(!matches(
            &("**.a.".repeat(30) + "b"),
            &("a.".repeat(400) + "a")
        ));
    }

    #[test]
    fn bad_patterns_are_named() {
        let problems = ["", "a..b", ".a", "a.", "***", "a**", "a.[0]", "a b", "a/b"]
            .map(|pattern| format!("`{pattern}` {}", problem(pattern).unwrap_or_default()));
        insta::assert_snapshot!(problems.join("\n"), @r"
        `` is empty
        `a..b` has an empty component
        `.a` has an empty component
        `a.` has an empty component
        `***` mixes `**` with other text in `***`
        `a**` mixes `**` with other text in `a**`
        `a.[0]` has the character `[`
        `a b` has the character ` `
        `a/b` has the character `/`
        ");
        assert_eq!(problem("encoder.layer.*.out-proj"), None);
    }
}
