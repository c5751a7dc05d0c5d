# Completion of adloco {{ version }}, written by `adloco completion fish`.
complete -c adloco -n __fish_use_subcommand -f -a '{{ options | join(" ") }}'
complete -c adloco -n __fish_use_subcommand -l help
complete -c adloco -n __fish_use_subcommand -l version
complete -c adloco -n '__fish_seen_subcommand_from completion' -f -a '{{ shells | join(" ") }}'
complete -c adloco -n '__fish_seen_subcommand_from {{ with_settings | join(" ") }}' -a '{{ recipes | join(" ") }}'
{% for option, commands in commands_with.items() %}
complete -c adloco -n '__fish_seen_subcommand_from {{ commands | join(" ") }}' -l {{ option[2:] }}
{%- if option in values %} -x -a '{{ values[option] | join(" ") }}'{% elif "." in option %} -r{% endif %}

{% endfor %}
