# Completion of adloco {{ version }}, written by `adloco completion {{ shell }}`.
{{ "autoload -Uz compinit bashcompinit && compinit && bashcompinit" if shell == "zsh" }}
_adloco() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
    # The = of --section.key=value is a word of its own.
    if [[ "$word" == "=" ]]; then word=""; fi
    if [[ "$before" == "=" ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{{ options | join(" ") }} --help --version"
    elif [[ "$word" == -* ]]; then
        case "${COMP_WORDS[1]}" in
{% for command, names in options.items() %}
            {{ command }}) words="{{ names | join(" ") }}" ;;
{% endfor %}
        esac
    else
        case "$before" in
{% for option, words in values.items() %}
            {{ option }}) words="{{ words | join(" ") }}" ;;
{% endfor %}
            --*) ;;
            *)
                case "${COMP_WORDS[1]}" in
                    {{ with_settings | join("|") }}) words="{{ recipes | join(" ") }}" ;;
                    completion) words="{{ shells | join(" ") }}" ;;
                esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
# Where nothing fits, the shell completes the names of files.
complete -o default -F _adloco adloco
